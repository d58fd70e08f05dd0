#!/bin/bash
# deb.sh RINGTAP FOLDER [VERSION]: packages of a built binary, and of the ringtap-lab beside it, for this Debian, with their debug
# symbols in packages of their own, in FOLDER. The version is the workspace's unless another is given.
set -euo pipefail
cd "$(dirname "$0")/.."
ringtap=$(realpath "${1:?usage: deb.sh RINGTAP FOLDER [VERSION]}")
mkdir -p "${2:?usage: deb.sh RINGTAP FOLDER [VERSION]}"
folder=$(realpath "$2")
version=${3:-$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)}

# Not in the checkout: debhelper works beside debian/control.
work=$(mktemp -d "${TMPDIR:-/tmp}/ringtap-deb.XXXXXX")
trap 'rm -rf "$work"' EXIT
cp -r Makefile contrib CHANGELOG.md README.md scripts "$work"
mv "$work/contrib/debian" "$work/debian"
cat >"$work/debian/changelog" <<END
ringtap ($version-1) unstable; urgency=medium

  * See /usr/share/doc/ringtap/changelog.gz.

 -- Ringtap developers <ringtap@localhost>  $(date -R ${SOURCE_DATE_EPOCH:+-d "@$SOURCE_DATE_EPOCH"})
END
echo README.md >"$work/debian/ringtap.docs"
[ -x "$(dirname "$ringtap")/ringtap-lab" ] || { echo "deb.sh: there is no ringtap-lab beside $ringtap" >&2; exit 1; }
cd "$work"
RINGTAP=$ringtap FOLDER=$folder fakeroot debian/rules binary
