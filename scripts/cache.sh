# Sourced by the scripts that build. The directory that keeps what lies outside the checkout: ccache's objects, too, where ccache has
# no directory of its own yet.
cache=$(realpath -m "${OSCAR_CACHE_DIR:-$HOME/.cache/oscar}")
[ -d "${XDG_CACHE_HOME:-$HOME/.cache}/ccache" ] || export CCACHE_DIR="${CCACHE_DIR:-$cache/ccache}"
