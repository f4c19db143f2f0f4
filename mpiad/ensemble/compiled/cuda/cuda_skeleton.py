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
// Ten times the distance from t to the next larger number; `nextafter` takes ten times the instructions.
INLINE double least_step(double t) {
    union { double x; long long bits; } next;
    next.x = t + 0.0;
    next.bits += next.bits < 0 ? -1 : 1;
    return 10 * (next.x - t);
}
// x^(-1/2n): single precision, then two steps of Newton's method for y^-2n = x, each of which squares the relative error.
// `pow` in double precision takes a third of a step's time. Beyond 1e-36 and 1e36 the step size is at its limits anyway.
INLINE double inverse_root(double x, const int n) {
    x = x < 1e-36 ? 1e-36 : x > 1e36 ? 1e36 : x;
    double y = exp2f(log2f((float)x) * (-0.5f / n));
    for (int k = 0; k < 2; ++k) {
        double power = y * y;
        for (int j = 1; j < n; ++j) power *= y * y;
        y += y * (1 - x * power) * (0.5 / n);
    }
    return y;
}
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
