/* What differs between compilers and processors, in one place. */
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

/* One function for each width of vectors; the loader of the program takes the widest that the processor has.  A
 * sanitizer starts after the loader, so that its builds have one. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && !defined(ONE_CLONE)
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED
#endif

/* Threads may set one flag at the same time, to the same value. */
#if defined(__GNUC__)
#define SET(flag) __atomic_store_n(flag, 1, __ATOMIC_RELAXED)
#else
#define SET(flag) (*(volatile int32_t *)(flag) = 1)
#endif

/* Elements a stage passes on at a time: few enough that all of a tile's arrays stay in the first-level cache. */
#define TILE 512

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

/* 2^exponent; the exponent is one of a normal float32. */
INLINE float power_of_two(int32_t exponent) { return float_of((int32_t)((uint32_t)(exponent + 127) << 23)); }

INLINE int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
INLINE int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }
INLINE float bounded(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

#endif
