"""What stands before the functions of both kernels."""

from __future__ import annotations

from mpiad.ensemble.compiled.kernel_form import Form
from mpiad.ensemble.compiled.kernel_template import filled

# NVRTC has no headers; a compiler for CPUs runs through the trajectories in a loop.
_PRELUDE = """
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define KERNEL extern "C" __global__ void
#define INLINE static __device__ __forceinline__
#define NEXT(count) ((long long)atomicAdd((unsigned long long*)(count), 1ULL))
#define EACH(i, n) \\
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
#ifndef INFINITY
#define INFINITY __longlong_as_double(0x7ff0000000000000LL)
#endif
#ifndef NAN
#define NAN __longlong_as_double(0x7ff8000000000000LL)
#endif
#else
#include <math.h>
#define KERNEL extern "C" void
#define INLINE static inline
#define NEXT(count) ((*(count))++)
#define EACH(i, n) for (long long i = 0; i < n; ++i)
#endif

// NaN where either is.
INLINE double larger(double a, double b) { return a > b || a != a ? a : b; }
INLINE double smaller(double a, double b) { return a < b || a != a ? a : b; }
INLINE bool finite_number(double a) { return a - a == 0; }
// Ten times what time can resolve.
INLINE double least_step(double t) { return 10 * (nextafter(t, (double)INFINITY) - t); }
typedef {real} real;

// When a trajectory's next state is to be saved.
INLINE double due_at(
    const double* times, long long n_saved, long long by_row, long long i, long long place, double sign
) {
    if (place >= n_saved) return INFINITY;
    return sign * times[by_row ? i * n_saved + place : place];
}
"""


def prelude(form: Form) -> str:
    """Return a state's type, and what C lacks."""
    return "\n".join(filled(_PRELUDE, {"real": "float" if form.single else "double"}))
