#!/usr/bin/env bash
# Installs Chromium, which the tests of pages and `make pictures` drive, with fonts.
set -euo pipefail

PACKAGES=(chromium fonts-dejavu-core)

usage() {
  cat << 'END'
Usage: scripts/install-chromium.sh

Installs Chromium and the DejaVu fonts on Debian, as root or with sudo.

A chromium, chromium-browser or google-chrome on PATH is enough: its version is printed and nothing is installed.
A snap does not count, because it cannot read files outside of the home folder.
END
}

fail() {
  echo "install-chromium: $*" >&2
  exit 1
}

here=${BASH_SOURCE[0]%install-*.sh}
# shellcheck source=scripts/as_root.sh
source "${here:-./}as_root.sh"

# Prints the version of a browser on PATH; scripts/chromium.py searches in the same way.
# On Ubuntu, chromium-browser starts a snap: its --version mentions the snap, or fails if the snap is not installed.
version_on_path() {
  local name version
  for name in chromium chromium-browser google-chrome; do
    version=$("$name" --version 2> /dev/null) || continue
    case $version in
      *snap*) ;;
      *) echo "$version" && return ;;
    esac
  done
  return 1
}

main() {
  case ${1:-} in
    '') ;;
    -h | --help) usage && return ;;
    *) echo "install-chromium: unknown argument: $1; see scripts/install-chromium.sh --help" >&2 && exit 2 ;;
  esac
  if version_on_path; then return; fi
  command -v apt-get > /dev/null ||
    fail "this script needs a Debian-like machine with apt-get; put chromium or google-chrome on PATH by hand"
  # A source that fails only earns a warning; what counts is the installation.
  as_root apt-get -q update || true
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "${PACKAGES[@]}" ||
    fail "apt could not install ${PACKAGES[*]} (Ubuntu has Chromium as a snap alone); put google-chrome on PATH by hand"
  version_on_path || fail "the installed chromium does not start"
}

main "$@"
