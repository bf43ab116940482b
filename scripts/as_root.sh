# Runs a command as root; the script that sources this has a function `fail`.
# shellcheck shell=bash
as_root() {
  if [ "$(id -u)" -eq 0 ]; then
    "$@"
  elif command -v sudo > /dev/null; then
    sudo "$@"
  else
    fail "root (or sudo) is needed for: $*"
  fi
}
