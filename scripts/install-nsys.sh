#!/usr/bin/env bash
# Installs Nsight Systems (nsys) from the distribution's non-free section, without a GPU, a driver or CUDA.
#
# The machine's own apt configuration stays as it is: the non-free section is read through a temporary one.
set -euo pipefail

PACKAGES=(nsight-systems nsight-systems-target)
LIBRARIES=(libpfm4 libssh-4)

usage() {
  cat << 'END'
Usage: scripts/install-nsys.sh [--prefix FOLDER] [--bin FOLDER]

Installs Nsight Systems (nsys) on Debian or Ubuntu; no GPU, driver or CUDA is needed.

  --prefix FOLDER  where the files go: /opt/nsys, or $NSYS_PREFIX
  --bin FOLDER     where the link to nsys goes: /usr/local/bin, or $NSYS_BIN; with a prefix, its bin folder
  --help           prints this

Without a prefix and a bin folder, an nsys on PATH is enough: its version is printed and nothing is installed.
END
}

wrong_argument() {
  echo "install-nsys: $*; see scripts/install-nsys.sh --help" >&2
  exit 2
}

fail() {
  echo "install-nsys: $*; install Nsight Systems by hand" >&2
  exit 1
}

here=${BASH_SOURCE[0]%install-*.sh}
# shellcheck source=scripts/as_root.sh
source "${here:-./}as_root.sh"

# Runs a command as root only where the folder (or its nearest existing parent) is not ours to write.
writing() {
  local folder=$1
  shift
  while [ ! -e "$folder" ]; do folder=$(dirname "$folder"); done
  if [ -w "$folder" ]; then "$@"; else as_root "$@"; fi
}

# Sets PREFIX and BIN to absolute paths, and CHOSEN where the caller named one of them.
parse_arguments() {
  local value
  PREFIX=${NSYS_PREFIX:-}
  BIN=${NSYS_BIN:-}
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) usage && exit ;;
      --prefix | --bin) [ $# -gt 1 ] || wrong_argument "$1 needs a folder" ;;
      --prefix=* | --bin=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
      *) wrong_argument "unknown argument: $1" ;;
    esac
    value=$2
    case $value in
      '' | -*) wrong_argument "$1 needs a folder, got '$value'" ;;
    esac
    [ "$1" = --prefix ] && PREFIX=$value || BIN=$value
    shift 2
  done
  CHOSEN=$PREFIX$BIN
  [ -n "$BIN" ] || BIN=${PREFIX:-/usr/local}/bin
  BIN=$(realpath -m "$BIN")
  PREFIX=$(realpath -m "${PREFIX:-/opt/nsys}")
}

# Prints the version of the nsys that is on PATH; fails where there is none.
version_on_path() {
  local nsys
  nsys=$(command -v nsys) && "$nsys" --version 2> /dev/null
}

# Prints the path of the nsys below a folder, leaving out trees that are not complete.
find_nsys() {
  find "$1" -path '*.partial/*' -prune -o -path '*/target-linux-*/nsys' -print -quit 2> /dev/null | grep .
}

link_nsys() {
  writing "$BIN" mkdir -p "$BIN"
  writing "$BIN" ln -sfn "$1" "$BIN/nsys"
  "$BIN/nsys" --version || fail "the installed nsys does not start"
  case ":$PATH:" in
    *":$BIN:"*) ;;
    *) echo "install-nsys: add $BIN to PATH" ;;
  esac
}

# Prints the given deb822 files with $1 as the only components, leaving out the stanzas that have no "main".
deb822_sources() {
  local section=$1
  shift
  awk -v section="$section" '
    function flush() {
      if (stanza != "" && has_main && !disabled) printf "%sComponents: %s\n\n", stanza, section
      stanza = ""; has_main = disabled = field = 0
    }
    FNR == 1 || /^[ \t]*$/ { flush() }
    /^[ \t]*(#|$)/ { next }
    /^[^ \t]/ { field = tolower($1) }
    field ~ /^components:/ { if ((" " $0 " ") ~ /[ \t:]main[ \t]/) has_main = 1; next }
    field == "enabled:" && tolower($2) == "no" { disabled = 1 }
    { stanza = stanza $0 "\n" }
    END { flush() }
  ' "$@"
}

# The same for the classic format: deb [options] uri suite component...
one_line_sources() {
  local section=$1
  shift
  sed -nE "s/^[[:space:]]*deb[[:space:]]+((\[[^]]*\][[:space:]]+)?[^[:space:]]+[[:space:]]+[^[:space:]]+)[[:space:]]+(.*[[:space:]])?main([[:space:]].*)?$/deb \1 $section/p" "$@"
}

# A configuration of apt that has the non-free section too, in a temporary folder; sets APT.
configure_apt() {
  local folder=$1 section=$2 files
  mkdir -p "$folder/sources" "$folder/lists/partial" "$folder/cache/archives/partial"
  mapfile -t files < <(find /etc/apt/sources.list.d -name '*.sources' 2> /dev/null)
  [ ${#files[@]} -eq 0 ] || deb822_sources "$section" "${files[@]}" > "$folder/sources/non-free.sources"
  mapfile -t files < <(find /etc/apt/sources.list /etc/apt/sources.list.d -name '*.list' 2> /dev/null)
  [ ${#files[@]} -eq 0 ] || one_line_sources "$section" "${files[@]}" > "$folder/sources/non-free.list"
  APT=(apt-get -q -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$folder/sources"
    -o "Dir::State::lists=$folder/lists" -o "Dir::Cache=$folder/cache" -o APT::Sandbox::User=)
}

download() {
  local folder=$1 section=$2
  fetch() { (cd "$folder/debs" && "${APT[@]}" -o APT::Sandbox::User= download "${PACKAGES[@]}"); }
  APT=(apt-get -q)
  if apt-get -qq download --print-uris "${PACKAGES[@]}" > /dev/null 2>&1 && fetch; then return; fi
  configure_apt "$folder" "$section"
  # A third party's source without this section only earns a warning; what counts is the download.
  "${APT[@]}" update || true
  fetch || fail "the apt sources of this machine have no ${PACKAGES[*]} in $section"
}

install_libraries() {
  local missing=() library
  for library in "${LIBRARIES[@]}"; do
    dpkg-query -W -f '${Status}' "$library" 2> /dev/null | grep -q ' installed$' || missing+=("$library")
  done
  [ ${#missing[@]} -eq 0 ] && return
  apt-get -qq install --simulate "${missing[@]}" > /dev/null 2>&1 || as_root apt-get -q update
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "${missing[@]}" ||
    fail "apt could not install ${missing[*]}"
}

# Puts right what leaving out the package manager leaves undone; every path is found, whatever the architecture.
complete_tree() {
  local tree=$1 target host libssh
  target=$(find "$tree/usr/lib" -type d -name 'target-linux-*' -print -quit)
  host=$(find "$tree/usr/lib" -type d -name 'host-linux-*' -print -quit)
  [ -x "$target/nsys" ] && [ -n "$host" ] || fail "the packages do not have the expected layout"
  # nsys looks for its importer beside the target folder, without it a report stays an unreadable .qdstrm
  [ -e "$(dirname "$target")/$(basename "$host")" ] ||
    ln -sr "$host" "$(dirname "$target")/$(basename "$host")"
  libssh=$(dpkg-query -L libssh-4 | grep -m 1 '/libssh\.so\.4$')
  ln -sf "$libssh" "$host/libssh.so"
}

main() {
  parse_arguments "$@"
  local nsys
  if [ -z "$CHOSEN" ] && version_on_path; then return; fi
  if nsys=$(find_nsys "$PREFIX"); then
    link_nsys "$nsys"
    return
  fi

  case $(uname -m) in
    x86_64 | aarch64) ;;
    *) fail "there is no package for a $(uname -m) machine" ;;
  esac
  command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null ||
    fail "this script needs a Debian-like machine with apt-get"

  local distribution section='contrib non-free' temporary version home
  # shellcheck source=/dev/null
  distribution=$(. /etc/os-release && echo "${ID:-}")
  [ "$distribution" != ubuntu ] || section=multiverse

  temporary=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$temporary'" EXIT
  mkdir "$temporary/debs" "$temporary/tree"
  download "$temporary" "$section"
  install_libraries

  local package
  for package in "$temporary"/debs/*.deb; do dpkg-deb -x "$package" "$temporary/tree"; done
  version=$(dpkg-deb -f "$(find "$temporary/debs" -name 'nsight-systems_*.deb')" Version)
  complete_tree "$temporary/tree"

  # The folder appears under its name only when it is whole, so an interrupted run leaves nothing half-made in use.
  home=$PREFIX/${version//[:~]/_}
  writing "$PREFIX" mkdir -p "$PREFIX"
  writing "$PREFIX" rm -rf "$home" "$home.partial"
  writing "$PREFIX" cp -a --no-preserve=ownership "$temporary/tree" "$home.partial"
  writing "$PREFIX" mv "$home.partial" "$home"
  link_nsys "$(find_nsys "$home")"
}

main "$@"
