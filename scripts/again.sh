#!/bin/bash
# Runs `cargo test … -- …`; up to three tests that fail are run once more, alone, and the run passes if they
# do then. Each such test is named in a line that scripts/skips.sh counts: a machine under load may fail a
# test now and then, one that fails again and again is wrong.
#   scripts/again.sh cargo test --test NAME -- --show-output
set -u
printed=$(mktemp) && trap 'rm -f "$printed"' EXIT
"$@" 2>&1 | tee "$printed"
status=${PIPESTATUS[0]}
[ "$status" != 0 ] || exit 0
# The last list before a program's result; what tests print stands in an earlier one.
mapfile -t failed < <(awk '/^failures:$/ { listed = ""; next }
    /^    [^ ]+$/ { listed = listed $1 "\n" }
    /^test result: FAILED/ { printf "%s", listed } /^test result:/ { listed = "" }' "$printed" | sort -u)
# Nothing is known of the others where a program crashed, did not compile or ran into its bound.
if [ "$status" != 101 ] || [ "${#failed[@]}" = 0 ] || [ "${#failed[@]}" -gt 3 ] \
    || grep -qE '^error(\[|: could not compile)|process didn.t exit successfully.*signal' "$printed"; then
    exit "$status"
fi
echo "again, alone: ${failed[*]}"
"$@" --exact "${failed[@]}" || exit
printf 'failed once, and not again: %s\n' "${failed[@]}"
