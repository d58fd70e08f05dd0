//! `ringtap compare` with its row `ublk`, on a host that has the driver.

use serde_json::Value;

use crate::lab::Lab;

/// Whatever way a comparison ends, no device is left, nobody who waits for one, and none of its files.
pub fn is_measured(lab: &Lab) {
    let said = lab.run(
        "a comparison",
        r#"mkdir /mnt/files/lab
         cd /mnt/files/lab
         compare() {
             out=$1; shift
             set -- --out $out --rounds "$@" --backends native,ublk --workloads dd-latency-direct
             exec /tmp/ringtap compare --stages host --dir . --size 32M --ramp 0 --seconds 1 "$@"
         }
         (compare whole 1 --output json 2>/tmp/lab.err) || { cat /tmp/lab.err >&2; exit 1; }
         none
         # Once with a server that ends as it should, and once with one that does not, whose client cannot be killed.
         for how in CONT STOP; do
             compare $how 100 >/dev/null 2>/tmp/lab.err & lab=$!
             for i in $(seq 600); do [ ! -b /dev/ublkb100 ] || break; sleep 0.05; done
             kill -$how $(list | sed -n 's/.*process \([0-9]*\),.*/\1/p')
             [ $how = CONT ] || sleep 1
             kill -INT $lab
             code=0; wait $lab || code=$?
             [ $code = 3 ] || { echo "ended with $code" >&2; cat /tmp/lab.err >&2; exit 1; }
             none
         done
         [ "$(echo *)" = 'CONT STOP whole' ] || { ls -R >&2; exit 1; }
         cd /
         rm -r /mnt/files/lab"#,
    );
    let report: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(report["failures"].as_array().map(Vec::len), Some(0), "{}", report["failures"]);
    let rows = report["series"].as_array().expect("series");
    assert!(
        rows.iter().any(|row| row["arm"] == "ublk" && row["median"]["value"].as_f64() > Some(0.0))
    );
}
