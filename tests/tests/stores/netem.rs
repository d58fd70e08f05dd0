//! A disk that moves to a server of another host, over a network that is slow and loses packets: two network namespaces of a guest,
//! for most kernels of hosts have no netem built in.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ringtap_guest::{Appliance, Builder, Machine, Uml};
use ringtap_tests::{lab, ringtap};
use serde_json::Value;

/// All of it runs in a guest.
const LONG: Duration = Duration::from_secs(300);

const SCRIPT: &str = r#"
set -e
mkdir -p /tmp/move
cd /tmp/move
export RINGTAP_STATE_DIR=/tmp/move/state
mkdir state
for name in here there; do ip netns add $name; ip -n $name link set lo up; done
ip link add near netns here type veth peer name far netns there
ip -n here addr add 10.9.0.1/24 dev near
ip -n there addr add 10.9.0.2/24 dev far
for one in "here near" "there far"; do
    set -- $one
    ip -n $1 link set $2 up
    ip netns exec $1 tc qdisc add dev $2 root netem delay 4ms 1ms loss 1%
done
truncate -s 24M here.raw
"$ringtap" create -q -f qcow2 there.qcow2 24M
ip netns exec there "$ringtap" serve there.qcow2 -f qcow2 --cache writeback --name e --nbd tcp:10.9.0.2:10809 >there.out 2>there.err &
there=$!
ip netns exec here "$ringtap" serve here.raw -f raw --cache writeback --node-name vm --vhost-user vm.sock --control unix:control >here.out 2>here.err &
here=$!
for out in here.out there.out; do
    for i in $(seq 300); do grep -qs ready $out && break; sleep 0.1; done
    grep -q ready $out || { cat *.err >&2; exit 1; }
done
"$lab" load --socket vm.sock --rw write --bs 64k --depth 4 --seconds 1 >/dev/null
"$lab" load --socket vm.sock --rw randrw --verify --depth 2 --fsync-every 32 --seconds 8 --output json >load.json 2>load.err &
load=$!
sleep 1
ip netns exec here "$ringtap" disk migrate --control unix:control --output json vm nbd://10.9.0.2:10809/e >moved.json || { cat *.err >&2; exit 1; }
wait $load || { cat load.err here.err >&2; exit 1; }
# A connection whose first packet is lost is there after a second.
"$lab" load --socket vm.sock --rw randrw --verify --depth 2 --seconds 3 --output json >after.json
kill $here
wait $here || { cat *.err >&2; exit 1; }
# The other host is gone without a word: requests fail in about the time that they may wait, not when the kernel despairs.
ip netns exec here "$ringtap" serve "nbd://10.9.0.2:10809/e?reconnect=2" -f raw --read-only --vhost-user far.sock >far.out 2>far.err &
far=$!
for i in $(seq 300); do grep -qs ready far.out && break; sleep 0.1; done
"$lab" load --socket far.sock --rw randread --seconds 20 >/dev/null 2>lost.err &
load=$!
sleep 1
ip netns exec here tc qdisc change dev near root netem loss 100%
code=0
wait $load || code=$?
[ $code != 0 ] || { echo "reads of a host that is gone went well" >&2; cat *.err >&2; exit 1; }
grep -q "the connection is lost" far.err || { cat *.err >&2; exit 1; }
kill $far
wait $far || true
kill $there
wait $there || { cat *.err >&2; exit 1; }
"$ringtap" check -q there.qcow2
cat moved.json load.json after.json
"#;

/// A program in the guest: its root is the host's, with folders of its own over some.
fn program(builder: Builder, path: &Path) -> (Builder, PathBuf) {
    match ["/tmp", "/run", "/mnt"].iter().any(|dir| path.starts_with(dir)) {
        true => {
            let there = Path::new("/opt").join(path.file_name().expect("a file"));
            (builder.file(path, &there), there)
        }
        false => (builder, path.to_owned()),
    }
}

#[test]
fn a_disk_moves_to_another_host_over_a_network_that_loses_packets() {
    let builder = Appliance::builder(Machine::Uml).modules(["veth", "sch_netem"]);
    let (builder, tap) = program(builder, &ringtap());
    let (builder, lab) = program(builder, &lab());
    let appliance = builder.build(&Appliance::default_cache());
    let appliance = appliance.unwrap_or_else(|error| panic!("{error}"));
    let guest = Uml::new(&appliance).memory(768 << 20).boot();
    let guest = guest.unwrap_or_else(|error| panic!("{error}"));
    let script = format!("ringtap='{}' lab='{}'\n{SCRIPT}", tap.display(), lab.display());
    let output = guest.exec(&script, LONG).expect("the guest answers");
    let output = output.success().unwrap_or_else(|error| panic!("{error}"));
    let told: Vec<Value> = serde_json::Deserializer::from_str(&output.stdout)
        .into_iter()
        .collect::<Result<_, _>>()
        .unwrap_or_else(|error| panic!("{error}: {}", output.stdout));
    let [moved, during, after] = &told[..] else { panic!("{told:?}") };
    for load in [during, after] {
        assert_eq!((&load["errors"], &load["verify"]["mismatches"]), (&0.into(), &0.into()));
        assert!(load["ios"].as_u64() > Some(10), "{load}");
    }
    let pause = moved["pause-ns"].as_u64().expect("a pause");
    assert!(moved["file"].as_str().is_some_and(|file| file.starts_with("nbd://10.9.0.2")));
    println!(
        "requests waited for {:.0} ms, at a round trip of 8 ms and 1 % of packets lost each way",
        pause as f64 / 1e6
    );
    guest.shutdown(LONG).expect("it ends");
}
