#!/usr/bin/env bash
# Make .venv-peers with the libraries that are measured beside mpiad. Call it again: what is there stays.
#
#   benchmarks/peers/install.sh [LIBRARY ...]
#
# LIBRARY  mpi4jax, mpi4torch (communication), torchdiffeq, torchode, diffrax (ensembles of ODEs), pyamg (multigrid),
#          devito (stencils; needs a C compiler), anuga (shallow water), numpyro (variational inference),
#          exponax (spectral methods); all by default
# PYTHON   interpreter for the environment (python3)
# JAX      what pip installs as JAX; 0.11.2 is the last that mpi4jax 0.9.1.post2 was tested with
# TORCH    what pip installs as torch. A CPU build: the default build brings gigabytes of CUDA along. Where the
#          index has none, name one that has in PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS.
#
# Ends with 0 if the libraries can all be imported, with 1 if one is missing, and says which and why.

set -uo pipefail

PYTHON=${PYTHON:-python3}
JAX=${JAX:-jax[cpu]>=0.6,<=0.11.2}
TORCH=${TORCH:-torch==2.13.0+cpu}
MPI4JAX=mpi4jax==0.9.1.post2
MPI4TORCH=mpi4torch==0.1.3
TORCHDIFFEQ=torchdiffeq==0.2.5
TORCHODE=torchode==1.0.1
DIFFRAX=diffrax==0.7.2
PYAMG=pyamg==5.4.1
DEVITO=devito==4.8.23
ANUGA=anuga==4.1.0
NUMPYRO=numpyro==0.22.0
EXPONAX=exponax==0.2.0

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=$root/.venv-peers
logs=$venv/logs
missing=0

pip_install() {
  nice -n 10 "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

has() {
  "$venv/bin/python" -c "import $1" 2>/dev/null
}

# give_up NAME LOG: say that a library could not be had, and show the end of its log.
give_up() {
  missing=1
  echo "peers: $1 could not be installed; its log is $2 and ends:" >&2
  grep -E 'error|ERROR' "$2" | tail -n 5 | cut -c 1-200 >&2
}

make_environment() {
  [ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv" || return 1
  mkdir -p "$logs" "$venv/no-cuda"
  { has mpi4py.MPI && has nanobind; } || pip_install mpich mpi4py numpy setuptools wheel nanobind
}

# mpi4jax takes the CUDA that it finds, and then misses headers: CUDA_PATH names an empty folder instead.
# Nothing built here may come from pip's cache or go into it: the path to this environment's MPI is linked in.
install_mpi4jax() {
  pip_install "$JAX" &&
    CUDA_PATH=$venv/no-cuda MPI4JAX_BUILD_MPICC=$venv/bin/mpicc \
      pip_install --no-cache-dir --no-build-isolation --no-deps "$MPI4JAX"
}

# mpi4torch sets the compiler in a way that newer setuptools passes over; CXX does it in all of them. Python's
# own optimisation flags are lost with it, so they are given again.
install_mpi4torch() {
  pip_install "$TORCH" || return 1
  local flags="-O3 -DNDEBUG" headers
  headers=$("$venv/bin/python" -c 'from torch.utils.cpp_extension import include_paths as p; print(p()[0])') ||
    return 1
  grep -q deleteNode "$headers/torch/csrc/autograd/function.h" || flags="$flags -include $here/torch_nodes.h"
  PATH=$venv/bin:$PATH CXX=$venv/bin/mpicxx CXXFLAGS=$flags MAX_JOBS=1 \
    pip_install --no-cache-dir --no-build-isolation --no-deps "$MPI4TORCH"
}

# SciPy is the side that all solvers of ODEs are timed beside. Named again, JAX and torch keep their versions.
install_torchdiffeq() { pip_install scipy "$TORCH" "$TORCHDIFFEQ"; }
install_torchode() { pip_install scipy "$TORCH" "$TORCHODE"; }
install_diffrax() { pip_install scipy "$JAX" "$DIFFRAX"; }
install_pyamg() { pip_install scipy "$PYAMG"; }
install_devito() { pip_install "$DEVITO"; }
install_anuga() { pip_install "$ANUGA"; }
install_numpyro() { pip_install "$JAX" "$NUMPYRO"; }
install_exponax() { pip_install "$JAX" "$EXPONAX"; }

if ! make_environment; then
  echo "peers: $venv could not be made with $PYTHON" >&2
  exit 1
fi
[ $# -gt 0 ] || set -- mpi4jax mpi4torch torchdiffeq torchode diffrax pyamg devito anuga numpyro exponax
for library; do
  case $library in
    mpi4jax | mpi4torch | torchdiffeq | torchode | diffrax | pyamg | devito | anuga | numpyro | exponax) ;;
    *) echo "peers: $library is none of mpi4jax, mpi4torch, torchdiffeq, torchode, diffrax, pyamg, devito, anuga, numpyro, exponax" >&2; exit 2 ;;
  esac
  if ! has "$library"; then
    "install_$library" >"$logs/$library.log" 2>&1
    has "$library" || give_up "$library" "$logs/$library.log"
  fi
done

"$venv/bin/python" -m pip list --disable-pip-version-check 2>/dev/null |
  grep -E '^(anuga|devito|diffrax|exponax|jax|jaxlib|mpi4jax|mpi4py|mpi4torch|mpich|numpy|numpyro|pyamg|scipy|torch|torchdiffeq|torchode) '
exit $missing
