#!/bin/bash
# guard-a.sh OLD NEW: what a walk through the engine costs, in two builds of the example `instructions`, exactly:
# instructions, system calls, allocations and operations for the reactor. Fails where NEW takes more than 1.03
# of OLD, or a hit allocates. docs/testing.md.
set -euo pipefail
old=${1:?usage: guard-a.sh OLD NEW} new=${2:?usage: guard-a.sh OLD NEW}
folder=$(mktemp -d /dev/shm/guard-a.XXXXXX)
trap 'rm -rf "$folder"' EXIT
few=1000 many=3000

instructions() { # BINARY WALK COUNT [FOLDER]
    valgrind --tool=callgrind --callgrind-out-file=/dev/null "$@" 2>&1 >/dev/null |
        sed -n 's/.*Collected : \([0-9]*\).*/\1/p'
}
calls() {
    strace -f -qq -o "$folder/calls" "$@" >/dev/null
    grep -vc resumed "$folder/calls"
}
# Of one walk: instructions, calls, allocations, operations.
cost() { # BINARY WALK [FOLDER]
    local binary=$1 walk=$2; shift 2
    local count told
    for count in $few $many; do
        told=$("$binary" "$walk" $count "$@")
        of[$count]="$(instructions "$binary" "$walk" $count "$@") $(calls "$binary" "$walk" $count "$@") \
            $(awk '{ print $2, $4 }' <<<"$told")"
    done
    awk -v n=$((many - few)) '{ for (i = 1; i <= 4; i++) if (NR == 1) a[i] = $i; else printf "%.3f ", ($i - a[i]) / n }' \
        <<<"${of[$few]}"$'\n'"${of[$many]}"
}
declare -A of
fails=0
printf '%-16s %-9s %-13s %10s %10s %7s\n' walk reactor what old new ratio
for place in memory ring; do
    for walk in raw-read raw-write bitmap-write qcow2-read qcow2-write qcow2-allocate overlay-first qcow2-flush; do
        at=(); [ $place = ring ] && at=("$folder")
        read -ra before <<<"$(cost "$old" $walk "${at[@]}")"
        read -ra after <<<"$(cost "$new" $walk "${at[@]}")"
        names=(instructions calls allocations operations)
        for i in 0 1 2 3; do
            hit=0; [[ $walk =~ -(read|write)$ && $i = 2 ]] && hit=1
            awk -v walk=$walk -v place=$place -v what=${names[$i]} -v old="${before[$i]}" -v new="${after[$i]}" -v hit=$hit '
                BEGIN {
                    ratio = old > 0 ? sprintf("%.3f", new / old) : "-"
                    bad = new > old * 1.03 + 0.005 || (hit && new > 0.005)
                    printf "%-16s %-9s %-13s %10.2f %10.2f %7s%s\n", walk, place, what, old, new, ratio, bad ? "  TOO MUCH" : ""
                    exit bad
                }' || fails=$((fails + 1))
        done
    done
done
[ $fails = 0 ] || { echo "$fails lines are too much"; exit 1; }
