#!/usr/bin/env bash
# Run the tests with the Pythons of Debian's unstable release, in a chroot: `.ci/sid.sh FOLDER [make's arguments]`.
#
# It needs root and debootstrap. The folder is made at the first run and kept. The packages are today's releases, since the
# lock file ends with Python 3.13; what has no wheel for a Python is built. It prints a line per Python: passed, failed, or
# why it was not run. Pythons without the GIL are not run.
set -uo pipefail
[ $# -ge 1 ] || { sed -n 2,6p "$0"; exit 2; }
root=$(realpath -m "$1"); shift
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ "$(id -u)" = 0 ] || { echo "sid: not run: needs root"; exit 3; }
command -v debootstrap > /dev/null || { echo "sid: not run: needs debootstrap"; exit 3; }

if [ ! -e "$root/.ready" ]; then
    [ -e "$root/usr/bin/apt-get" ] || debootstrap --variant=minbase sid "$root" "${MIRROR:-http://deb.debian.org/debian}" || exit 1
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    chroot "$root" apt-get install -y --no-install-recommends ca-certificates gcc g++ gfortran make libc6-dev > /dev/null || exit 1
    touch "$root/.ready"
fi
if [ -n "${CERTIFICATES:-}" ]; then cp "$CERTIFICATES" "$root/etc/ssl/certs/ca-certificates.crt"; fi

mounted=()
trap 'for each in "${mounted[@]}"; do umount "$root/$each"; done' EXIT
for each in proc dev dev/shm sys; do
    mkdir -p "$root/$each"
    mount --bind "/$each" "$root/$each" && mounted=("$each" "${mounted[@]}")
done

status=0
for version in 3.14 3.15; do
    if ! chroot "$root" apt-get install -y --no-install-recommends "python$version-venv" "python$version-dev" > /dev/null 2>&1; then
        echo "Python $version: not run: Debian's unstable release has no python$version-venv"
        continue
    fi
    rm -rf "$root/tree-$version" && mkdir "$root/tree-$version"
    tar -C "$tree" --exclude='./.venv*' --exclude=./.git --exclude=__pycache__ -c . | tar -C "$root/tree-$version" -x
    chroot "$root" env -i HOME=/root PATH=/usr/bin:/bin OPENBLAS_NUM_THREADS=1 PIP_DEFAULT_TIMEOUT=180 \
        make -C "/tree-$version" --no-print-directory test VERSIONS=newest MPI=mpich PYTHON="python$version" "$@"
    result=$?
    if [ $result = 0 ]; then echo "Python $version: passed"; else echo "Python $version: FAILED with $result"; status=1; fi
    if chroot "$root" sh -c "command -v python${version}t" > /dev/null; then
        echo "Python ${version}t (free-threaded): not run"
    fi
done
exit $status
