#!/bin/bash
# Reads what `cargo test -- --show-output` prints, passes on what it would print without that, and says at the
# end how many tests were skipped and why, and which passed only when they were run again (scripts/again.sh).
# A test that cannot run here prints `skipped: REASON`.
#   cargo test -- --show-output | scripts/skips.sh LIST
# LIST has a line `TEST: REASON` for each skip that is known; with CI set another one is a failure, and so are
# more than five tests that failed once.
set -u
list=$1
found=$(mktemp) && once=$(mktemp) && trap 'rm -f "$found" "$once"' EXIT
awk -v found="$found" -v once="$once" '
    /^failed once, and not again: / { print "    " $6 >once }
    /^test .* \.\.\. ignored/ { name = $2; why = $0; sub(/.*ignored,? ?/, "", why)
        print name ": " (why == "" ? "ignored" : why) >found }
    /^successes:$/ { within = 1 }
    /^(failures:$|test result:)/ { within = 0 }
    within && /^---- .* stdout ----$/ { name = $2 }
    within && /^skipped: / { print name ": " substr($0, 10) >found }
    !within { print; fflush() }
'
sort -u -o "$found" "$found"
failed=$(wc -l <"$once")
if [ "$failed" != 0 ]; then
    echo "$failed test(s) failed once, and passed when they were run again:"
    cat "$once"
    if [ -n "${CI:-}" ] && [ "$failed" -gt 5 ]; then exit 1; fi
fi
count=$(wc -l <"$found")
if [ "$count" = 0 ]; then echo "no test was skipped"; exit 0; fi
echo "$count test(s) skipped:"
sed 's/^/    /' "$found"
unknown=$(grep -vxFf <(grep -v '^#' "$list") "$found") || exit 0
[ -n "${CI:-}" ] || exit 0
echo "not in $list:"
sed 's/^/    /' <<<"$unknown"
exit 1
