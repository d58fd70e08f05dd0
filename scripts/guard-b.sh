#!/bin/bash
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
record=$here/bench/guard-b.before

usage() {
    cat <<END
guard-b.sh [OLD [NEW]] [ARGUMENTS]: is the Ringtap of the checkout NEW as good as that of OLD?

Links each three times, its sections in another order each time, and measures all six in one run, interleaved.
docs/testing.md says what is compared and when it fails.

  OLD   a checkout, or a commit of this repository; without it the one in bench/guard-b.before.
        A commit is cloned and built in \$RINGTAP_GUARD (/var/tmp/ringtap-guard), and kept there for the next time.
  NEW   a checkout; without it this one.

  --lines TEXT,TEXT  only lines whose name contains one of these: vhost-user, nbd, allocated, fresh, overlay,
                     convert, ublk (in a guest), memory, idle, or more of a name
  --only TEXT,TEXT   of these, only workloads whose name contains one of these
  --names            print the names of the lines, and build and measure nothing but that
  --fs tmpfs,ext4,null  what lies under the servers
  --rounds N         below 6 no interval is given, and nothing holds (8)
  --seconds S        per load; an idle server is watched for ten times as long (1)
  --size BYTES, --dir PATH, --pin, --output json

For example: guard-b.sh 700a171 --fs tmpfs --lines convert,idle
END
}

sides=()
while [ $# -gt 0 ] && [[ $1 != -* ]]; do
    sides+=("$1")
    shift
done
for argument in "$@"; do
    case $argument in -h | --help) usage && exit 0 ;; esac
done
[ ${#sides[@]} -le 2 ] || { usage >&2 && exit 2; }
old=${sides[0]:-$(grep -v '^#' "$record")} new=${sides[1]:-$here}

guard() {
    (cd "$new" && scripts/cargo build --release --locked -q -p ringtap-bench --bin guard_b)
    local usual=()
    [[ " $* " == *" --rounds"* ]] || usual+=(--rounds 8)
    [[ " $* " == *" --seconds"* ]] || usual+=(--seconds 1)
    "$new/target/release/guard_b" "${usual[@]}" "$@"
}
if [[ " $* " == *" --names "* ]]; then
    guard "$@"
    exit
fi

if [ ! -d "$old" ]; then
    commit=$(git -C "$here" rev-parse --verify --quiet "$old^{commit}") || {
        echo "guard-b.sh: $old is no checkout, and no commit of $here: fetch it (git fetch --unshallow), or name another" >&2
        exit 2
    }
    old=${RINGTAP_GUARD:-/var/tmp/ringtap-guard}/$commit
    [ -d "$old" ] || {
        mkdir -p "$(dirname "$old")"
        rm -rf "$old.new"
        git clone -q --no-checkout "$here" "$old.new"
        git -C "$old.new" checkout -q "$commit"
        mv "$old.new" "$old"
    }
fi

links=$(mktemp -d /var/tmp/guard-b.XXXXXX)
trap 'rm -rf "$links"' EXIT
arguments=()
for side in old new; do
    for n in 1 2 3; do
        (cd "${!side}" && "$here/scripts/cargo" rustc --release --locked -q -p ringtap --bin ringtap -- \
            -C "link-arg=-Wl,--shuffle-sections=*=$n")
        cp "${!side}/target/release/ringtap" "$links/$side-$n"
        arguments+=("--$side" "$links/$side-$n")
    done
done
guard "${arguments[@]}" "$@"
