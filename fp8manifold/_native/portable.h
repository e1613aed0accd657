/* What differs between compilers and processors, and floats as their bits. */
#ifndef FP8MANIFOLD_PORTABLE_H
#define FP8MANIFOLD_PORTABLE_H

#include <stdint.h>
#include <string.h>

#if defined(_MSC_VER)
#define INLINE static __forceinline
#define EXPORT __declspec(dllexport)
#else
#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#endif

/* Compiles a function for several widths of vectors.  The program's loader takes the
 * widest that the processor has.  ONE_CLONE is for builds with a sanitizer, which
 * starts after the loader. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(ONE_CLONE)
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED
#endif

/* Sets a flag.  Several threads may do so at the same time, as all write the same
 * value. */
#if defined(__GNUC__)
#define SET_FLAG(flag) __atomic_store_n(flag, 1, __ATOMIC_RELAXED)
#else
#define SET_FLAG(flag) (*(volatile int32_t *)(flag) = 1)
#endif

/* Asks for the cache line of an address before it is read. */
#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

INLINE int32_t bits_of(float x)
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(int32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* 2^exponent, which must be a normal float32. */
INLINE float power_of_two(int32_t exponent)
{
    return float_of((int32_t)((uint32_t)(exponent + 127) << 23));
}

INLINE int32_t min_int(int32_t a, int32_t b) { return a < b ? a : b; }
INLINE int32_t max_int(int32_t a, int32_t b) { return a > b ? a : b; }

/* x between two bounds; NaN stays NaN. */
INLINE float clamp(float x, float low, float high)
{
    const float at_least_low = x < low ? low : x;
    return at_least_low > high ? high : at_least_low;
}

#endif
