# SPDX-License-Identifier: GPL-2.0-or-later
# Sourced by the scripts beside it. They run with the checkout as $ROOT.
# shellcheck shell=sh disable=SC2034 # variables are for those
set -eu

ROOT=$(cd "$(dirname "$0")/.." && pwd -P)
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/qemu-fault-exits
BUILD=$ROOT/build
export CCACHE_DIR="$CACHE/ccache"

ME=${0##*/}

say() { echo "$ME: $*" >&2; }

die() {
    say "error: $*"
    exit 1
}

# A directory under $1 that is removed at exit, also after Ctrl-C; its name is in $TMP.
make_tmp() {
    mkdir -p "$1" 2>/dev/null || die "cannot make the directory $1: free space there or set another place"
    TMP=$(mktemp -d "$1/.tmp-$ME.XXXXXX") || die "cannot write in $1: disk full or no permission"
    trap 'rm -rf "$TMP"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
}

# Wait for a lock file; it is held until the calling script exits.
lock() {
    mkdir -p "$(dirname "$1")"
    exec 9>"$1"
    flock -n 9 || {
        say "waiting for another run that holds $1"
        flock 9
    }
}

# The Debian mirror of this machine's apt sources. The main archive has a code name without
# '-' (the others: bookworm-updates, bookworm-security). Before the first apt-get update only
# the suite's name is known.
debian_mirror() {
    # shellcheck disable=SC2016 # apt expands the first, awk the others
    m=$(apt-get indextargets --format '$(ORIGIN)|$(CODENAME)|$(RELEASE)|$(REPO_URI)' 2>/dev/null |
        awk -F'|' '
            $1 == "Debian" && $2 !~ /-/ { print $4; found = 1; exit }
            $1 !~ /^[A-Za-z]/ && $3 ~ /^(bookworm|trixie|forky|sid|oldstable|stable|testing|unstable)$/ &&
                late == "" { late = $4 }
            END { if (!found) print late }')
    [ -n "$m" ] || die "this machine's apt sources name no Debian main archive: add one (deb URI bookworm main), then apt-get update"
    echo "$m"
}
