# SPDX-License-Identifier: GPL-2.0-or-later
# The scripts in this directory source it. They run with the checkout as $ROOT.
# shellcheck shell=sh disable=SC2034 # variables are for those
set -eu

ROOT=$(cd "$(dirname "$0")/.." && pwd -P)
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/qemu-fault-exits
BUILD=$ROOT/build
# With depend mode, the compiler lists the headers itself: ccache preprocesses nothing first.
export CCACHE_DIR="$CACHE/ccache" CCACHE_DEPEND=1
# The options of a calling make are not for other makes.
unset MAKEFLAGS MFLAGS

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
    trap 'rm -rf --one-file-system "$TMP"' EXIT
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

# Prints the Debian mirror of this machine's apt sources. Before the first apt-get update, apt has
# only the source's own lines about an archive.
mirror() {
    for known in 'Label: Debian' "Release: $(. /etc/os-release && echo "$VERSION_CODENAME")"; do
        # shellcheck disable=SC2016 # apt expands it
        apt-get indextargets --format '$(REPO_URI)' 'Component: main' "$known"
    done | head -n 1
}

# Run mmdebstrap for any release of Debian, with the mirror, the proxies and the passwords of this
# machine's apt: debian RELEASE TARGET OPTION...; with $backports set, apt also uses the release's
# backports.
# In chrootless mode, no program of the target runs, so that mmdebstrap's warning about root does not apply.
debian() {
    release=$1
    target=$2
    shift 2
    uri=$(mirror)
    [ -n "$uri" ] || die "this machine's apt sources name no Debian main archive: add one, then apt-get update"
    from="[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $uri $release main"
    apt-config dump --format '%F "%v";%n' Acquire::http Acquire::https \
        Acquire::Check-Valid-Until Acquire::Check-Date >"$TMP/apt.conf"
    # shellcheck disable=SC2016 # so does mmdebstrap
    mmdebstrap --aptopt="$TMP/apt.conf" --aptopt='APT::Sandbox::User "root"' \
        --setup-hook='cp -R /etc/apt/auth.conf.d "$1/etc/apt/"' "$@" \
        "$release" "$target" "deb $from" "deb-src $from" \
        ${backports:+"deb ${from% "$release" main} $release-backports main"} </dev/null >&2 ||
        die "mmdebstrap failed (see above): if apt did, check the network and the free space in ${TMP%/*}"
}
