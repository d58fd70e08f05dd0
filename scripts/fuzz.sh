#!/bin/bash
# Runs every fuzz target, or those named, guided by coverage (libFuzzer, with any Rust that builds the rest), for so
# many minutes each. What is found on the way goes to target/fuzz/corpus, what fails to target/fuzz/crashes; then
# the exit status is 1.
#   scripts/fuzz.sh MINUTES [TARGET...]
#   scripts/fuzz.sh --keep [TARGET...]   commit-ready: the smallest inputs of target/fuzz/corpus that reach more
#   scripts/fuzz.sh --sum FILE           what each target got in all runs that wrote their lines to FIGURES=FILE
# FIGURES=FILE: a line for each target goes there too.
set -euo pipefail
cd "$(dirname "$0")/.."
minutes=${1:?say how many minutes for each target}
shift
if [ "$minutes" = --sum ]; then
    # DATE NAME: CPU minutes of CPU, RUNS executions, INPUTS inputs, END
    awk '{ cpu[$2] += $3; runs[$2] += $7; inputs[$2] = $9; failed[$2] += /FAILED/ }
        END { for (name in cpu) printf "%s %.1f minutes of CPU, %d executions, %d inputs, %d failures\n",
            name, cpu[name], runs[name], inputs[name], failed[name] }' "${1:?say which file}" | sort
    exit
fi
out=$PWD/target/fuzz
triple=$(scripts/cargo -vV | sed -n 's/^host: //p')
# Of what is kept of one target.
most=10240
mkdir -p "$out/corpus" "$out/crashes"

flags="--cfg fuzzing --cfg fuzzing_libfuzzer -Cpasses=sancov-module"
for option in level=4 inline-8bit-counters pc-table trace-compares; do
    flags+=" -Cllvm-args=-sanitizer-coverage-$option"
done
# With --target, build scripts and macros are built without these flags.
mapfile -t programs < <(RUSTFLAGS="$flags" scripts/cargo test --locked --profile fuzz -p ringtap-fuzz --test '*' --no-run \
    --target "$triple" --target-dir "$out/build" --message-format json-render-diagnostics |
    sed -n 's/.*"target":{"kind":\["test"\].*"executable":"\([^"]*\)".*/\1/p')
[ ${#programs[@]} -gt 0 ] || { echo "fuzz: nothing was built" >&2; exit 2; }

# run PROGRAM TARGET ARGUMENTS...: from where the programs look for what is theirs, for `limit` seconds at most.
run() {
    local program=$1 name=$2
    shift 2
    (cd fuzz && BOLERO_LIBFUZZER_ARGS="$*" timeout --foreground --signal ABRT --kill-after 60 "${limit:-0}" \
        "$program" --exact "$name" --nocapture --test-threads 1)
}

keep() {
    local name=$1 size=0 bytes file
    local chosen=$out/chosen/$name own=fuzz/tests/__fuzz__/$name/corpus
    rm -rf "$chosen"
    mkdir -p "$chosen" "$own"
    # A merge ends by an assertion of libFuzzer's own in a test harness, and keeps the input before it.
    run "$2" "$name" -merge=1 -artifact_prefix="$out/chosen/" "$chosen" "$PWD/$own" "$out/corpus/$name" >"$out/$name.log" 2>&1 || true
    size=$(cat "$own"/* 2>/dev/null | wc -c)
    while read -r bytes file; do
        cmp -s "$file" "$own/${file##*/}" && continue
        [ $((size += bytes)) -le $most ] || break
        cp "$file" "$own/"
    done < <(find "$chosen" -type f -printf '%s %p\n' | sort -n)
    echo "$name: $(find "$own" -type f | wc -l) inputs, $(cat "$own"/* | wc -c) bytes"
}

failed=0
for program in "${programs[@]}"; do
    while read -r name; do
        if [ $# -gt 0 ] && [[ " $* " != *" $name "* ]]; then continue; fi
        corpus=$out/corpus/$name own=$PWD/fuzz/tests/__fuzz__/$name/corpus log=$out/$name.log
        # What is no target makes no use of this and ends at once.
        said=$(run "$program" "$name" -runs=0 2>&1 || true)
        if [[ $said != *"INFO: Seed"* ]]; then continue; fi
        mkdir -p "$corpus" "$own"
        if [ "$minutes" = --keep ]; then
            keep "$name" "$program"
            continue
        fi
        seconds=$(awk "BEGIN {print int($minutes * 60)}")
        status=0
        TIMEFORMAT='cpu %U %S'
        # libFuzzer's own alarm (-timeout) goes to the harness's main thread, which heeds none. SIGABRT has it keep
        # the input that runs.
        { time limit=$((seconds * 2 + 120)) run "$program" "$name" -max_total_time="$seconds" -rss_limit_mb=4096 \
            -print_final_stats=1 -artifact_prefix="$out/crashes/$name-" "$corpus" "$own"; } >"$log" 2>&1 || status=$?
        cpu=$(awk '$1 == "cpu" {printf "%.1f", ($2 + $3) / 60}' "$log")
        runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -n 1)
        end="no failure"
        if [ "$status" -ne 0 ]; then
            failed=1
            end="FAILED, see $log"
            # Of timeout.
            [ "$status" -ne 124 ] || end="FAILED: an input that never ends, see $log"
        fi
        line="$name: $cpu minutes of CPU, ${runs:-?} executions, $(find "$corpus" -type f | wc -l) inputs, $end"
        echo "$line"
        if [ -n "${FIGURES:-}" ]; then echo "$(date +%F) $line" >>"$FIGURES"; fi
    done < <("$program" --list --format terse 2>/dev/null | sed -n 's/: test$//p')
done
exit $failed
