/* The records of a step.  fp8manifold/_numerics/records.py has the same fields, in this
 * order. */
#ifndef FP8MANIFOLD_STEP_H
#define FP8MANIFOLD_STEP_H

#include "chart.h"
#include "draws.h"
#include "format.h"

/* Directions. */
enum { ADAM, SGD, LION, MUON };

/* How a weight is stored: codes; floats on the grid; floats anywhere in the format's
 * range; floats without a format. */
enum { CODES, GRID, FREE, PLAIN };

/* How the target of a step is rounded.  RESIDUAL8 stores eight more bits of it;
 * MOMENTUM adds the rounding error to the first moment. */
enum { WRITE_NEAREST, WRITE_STOCHASTIC, WRITE_RESIDUAL8, WRITE_MOMENTUM };

/* How moments are stored. */
enum { FLOAT32, BFLOAT16, EIGHT_BITS };

/* How a weight moves: straight in value; along the chart of the metric; along its
 * tangent. */
enum { LINEAR, EXPONENTIAL, TANGENT };

/* The exponent of the stiffness field that scales a step: 0, 1, 1/2, 2, any other. */
enum { FIELD_NONE, FIELD_LINEAR, FIELD_SQRT, FIELD_SQUARE, FIELD_POWER };

enum { METRIC_ULP, METRIC_EUCLIDEAN };

/* How many elements of a parameter share a scale. */
enum { ONE_SCALE, SCALE_A_ROW, SCALE_AN_ELEMENT };

/* The flags that a step sets: a code is the format's last of either sign; a tile is all
 * 0. */
enum { IS_SATURATED, HAS_ZERO_TILE, FLAGS };

/* The numbers of a step: NUMBERS of fp8manifold/optim/_directions.py, in its order. */
typedef struct {
    float beta1, gain1, beta2, gain2, eps, rate, keep, inverse_reference, log_reference;
    float low, high, log_low, log_high, power, inject, per_unit;
} Hyper;

/* The choices of a step, the same in every step, as in fp8manifold/optim/_spec.py. */
typedef struct {
    int32_t direction, storage, writeback, moments, geometry, stiffness, metric;
    int32_t decays, nesterov, maximize;
    Format format;
} Spec;

/* One parameter's step.  The parameter is a matrix; the elements of a row share a block
 * of 8-bit moments, and a scale unless each has one. */
typedef struct {
    const Spec *spec;
    void *weight; /* uint8 codes or float32 */
    const float *gradient;
    const float *scale;
    int8_t *residual;
    void *first, *second; /* moments: float32, bfloat16 or codes */
    float *largest;       /* the largest second moments so far, of AMSGrad */
    /* bounds of each row's 8-bit moments; of a fitted first moment, its largest
     * magnitude */
    float *first_bound, *second_bound;
    int32_t *flags; /* FLAGS of them: IS_SATURATED, ... */
    int64_t rows, length;
    int32_t scales;  /* ONE_SCALE, ... */
    int32_t repeats; /* rows that share one scale */
    /* exponents of values, between which the chart's exponent follows the format's */
    int32_t low_exponent, high_exponent;
    Keys weight_keys, moment_keys;
    Hyper hyper;
} Job;

/* As NumPy lays them out; a platform that differs is not built for. */
_Static_assert(sizeof(Spec) == 96, "the size of SPEC in records.py");
_Static_assert(sizeof(Job) == 216, "the size of JOB in records.py");

#endif
