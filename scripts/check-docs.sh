#!/bin/bash
# Checks what the documents say against what there is: links lead somewhere, files that are named
# exist, functions and types named in docs/architecture.md are in the code, words of the glossary are where it says,
# options shown in an example of `ringtap` are options, and the targets and scripts named in README.md are there. No
# file of the code has more than 600 lines, and none import one another in a circle.
#   scripts/check-docs.sh RINGTAP
set -euo pipefail
cd "$(dirname "$0")/.."
ringtap=${1:?name the ringtap binary}
problems=0
complain() { echo "check-docs: $1" >&2; problems=$((problems + 1)); }

documents=(README.md CHANGELOG.md docs/*.md)
for document in "${documents[@]}"; do
    # [text](target), without web addresses and without the anchor.
    while read -r target; do
        [ -e "$(dirname "$document")/$target" ] || complain "$document links to $target, which is not there"
    done < <(grep -oE '\]\([^)#]+' "$document" | cut -c3- | grep -vE '^(https?|mailto):' || true)
    # `crates/x/y.rs` and the like.
    while read -r path; do
        [ -e "$path" ] || complain "$document names $path, which is not there"
    done < <(grep -oE '`(crates|tests|bench|fuzz|docs|scripts|contrib)/[A-Za-z0-9_./@-]+`' "$document" | tr -d '`' || true)
    while read -r target; do
        grep -qE "^$target:" Makefile || complain "$document names make $target, which is no target"
    done < <(grep -oE '`make [a-z-]+`' "$document" | tr -d '`' | cut -d' ' -f2 || true)
done

# `Type::function` and `function()` in the walk through the rooms; both in one file.
while read -r name; do
    function=${name##*::}
    function=${function%%(*}
    mapfile -t files < <(grep -rlE "(fn|struct|enum|trait|type|const) $function\b|^ *$function( \{|\(|,)" crates/*/src || true)
    [ ${#files[@]} -gt 0 ] || { complain "docs/architecture.md names $name, and no code defines it"; continue; }
    if [[ $name == *::* ]]; then
        type=${name%%::*}
        grep -qE "(struct|enum|trait|mod|type) $type\b|^ *(pub )?(unsafe )?impl\b.*\b$type\b" "${files[@]}" ||
            complain "docs/architecture.md names $name, and $type has no such thing"
    fi
done < <(grep -oE '`([A-Z][A-Za-z]+::[a-z_A-Z]+|[a-z_]+\(\))`' docs/architecture.md | tr -d '`' | sort -u)

# A word of the glossary, or the first of them, stands in the file or folder at which reading it is to begin.
while IFS='|' read -r _ words _ place _; do
    place=$(grep -oE '`[a-z]+/[^`]+`' <<<"$place" | tr -d '`' || true)
    [ -n "$place" ] && [ -e "$place" ] || continue
    found=no
    for word in $(tr -c 'A-Za-z\n' ' ' <<<"$words"); do
        [ ${#word} -lt 3 ] || ! grep -rqi -- "${word%s}" "$place" || found=yes
    done
    [ $found = yes ] || complain "docs/glossary.md sends who reads$words to $place, which has no such word"
done < <(grep -E '^\| .* \| .*`(crates|tests)/' docs/glossary.md)

while read -r lines file; do
    [ "$file" = total ] || [ "$lines" -le 600 ] || complain "$file has $lines lines: one file, one idea, 600 at most"
done < <(git ls-files -z '*.rs' '*.sh' '*.py' | xargs -0 wc -l)

mapfile -t roots < <(git ls-files '*.rs' | grep -E '(^|/)src/(lib|main)\.rs$|(^|/)tests/[^/]+/main\.rs$')
while read -r circle; do
    complain "$circle (scripts/circles.py -v says by what): move what both need to a file of its own"
done < <(scripts/circles.py "${roots[@]}" || true)

# Long options after `ringtap COMMAND` in examples; a line that ends in \ goes on.
while read -r command options; do
    help=$("$ringtap" "$command" --help 2>/dev/null) || { complain "ringtap $command is no command"; continue; }
    for option in $(grep -oE '(^| )--[a-z-]+' <<<"$options" || true); do
        grep -qE -- "(^|[ ,])$option([ =[]|$)" <<<"$help" || complain "ringtap $command has no $option"
    done
done < <(sed -e ':more' -e '/\\$/{N;s/\\\n//;bmore' -e '}' "${documents[@]}" contrib/systemd/* |
    grep -oE '(^|[ /])ringtap (serve|daemon|top|reload|upgrade|xen|create|info|list|map|convert|publish|check|resize|snapshot|bitmap|commit|rebase|detach|compare|report|completions|man) [^|`#]*' | sed 's/^.*ringtap //')

if [ "$problems" -gt 0 ]; then
    echo "check-docs: $problems problem(s)" >&2
    exit 1
fi
echo "check-docs: ${#documents[@]} documents agree with the code"
