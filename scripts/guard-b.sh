#!/bin/bash
# guard-b.sh OLD NEW [arguments of guard_b]: is the Ringtap of the checkout NEW as fast as that of the checkout OLD? Links each
# three times, its sections in another order each time, and measures all of them in one run. docs/testing.md.
set -euo pipefail
old=${1:?usage: guard-b.sh OLD NEW} new=${2:?usage: guard-b.sh OLD NEW}
shift 2
links=$(mktemp -d /var/tmp/guard-b.XXXXXX)
trap 'rm -rf "$links"' EXIT
arguments=()
for side in old new; do
    for n in 1 2 3; do
        (cd "${!side}" && scripts/cargo rustc --release --locked -q -p ringtap --bin ringtap -- \
            -C "link-arg=-Wl,--shuffle-sections=*=$n")
        cp "${!side}/target/release/ringtap" "$links/$side-$n"
        arguments+=("--$side" "$links/$side-$n")
    done
done
(cd "$new" && scripts/cargo build --release --locked -q -p ringtap-bench)
"$new/target/release/guard_b" "${arguments[@]}" --rounds 8 --seconds 1 "$@"
