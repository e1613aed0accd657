/* The records of a step.  fp8manifold/_numerics/records.py has the same fields in the same order. */
#ifndef FP8MANIFOLD_STEP_H
#define FP8MANIFOLD_STEP_H

#include "chart.h"
#include "draws.h"
#include "format.h"

enum { ADAM, SGD, LION, MUON };                             /* directions */
enum { CODES, GRID, FREE, PLAIN };                          /* storages */
enum { WRITE_NEAREST, WRITE_STOCHASTIC, WRITE_RESIDUAL8, WRITE_MOMENTUM };
enum { FLOAT32, BFLOAT16, EIGHT_BITS };                     /* moments */
enum { LINEAR, EXPONENTIAL, TANGENT };                      /* geometries */
enum { FIELD_NONE, FIELD_LINEAR, FIELD_SQRT, FIELD_SQUARE, FIELD_POWER };
enum { METRIC_ULP, METRIC_EUCLIDEAN };
enum { ONE_SCALE, SCALE_A_ROW, SCALE_AN_ELEMENT };

/* The numbers of a step: NUMBERS of fp8manifold/optim/_directions.py, in its order. */
typedef struct {
    float beta1, gain1, beta2, gain2, eps, rate, keep, inverse_reference, log_reference;
    float low, high, log_low, log_high, power, inject, per_unit;
} Hyper;

/* The fixed part of a step, as in fp8manifold/optim/_spec.py. */
typedef struct {
    int32_t direction, storage, writeback, moments, geometry, stiffness, metric;
    int32_t decays, nesterov, maximize;
    Format format;
} Spec;

/* One parameter's step: a matrix of `rows` rows, each of which shares a block of the averages or a scale. */
typedef struct {
    const Spec *spec;
    void *weight;            /* uint8 codes or float32 */
    const float *gradient;
    const float *scale;
    int8_t *residual;
    void *first, *second;    /* averages: float32, bfloat16 or codes */
    float *largest;          /* AMSGrad's */
    float *first_bound, *second_bound; /* of each row; the largest magnitude of a fitted first average */
    int32_t *reached;        /* set where a code is the format's last, to either side; the next where a tile is all 0 */
    int64_t rows, length;
    int32_t scales;          /* ONE_SCALE, ... */
    int32_t repeats;         /* rows that share one scale */
    int32_t low_exponent, high_exponent; /* of values; between them the chart's exponent follows the format's */
    Keys weight_keys, average_keys;
    Hyper hyper;
} Job;

/* As NumPy lays them out; a platform that differs is not built for. */
_Static_assert(sizeof(Spec) == 96, "the size of SPEC in records.py");
_Static_assert(sizeof(Job) == 216, "the size of JOB in records.py");

#endif
