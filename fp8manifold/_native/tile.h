/* A tile: some elements of a row, and what the stages of a step hand on from one to the
 * next.
 *
 *     load_weights, load_gradient, load_moments
 *         -> adam, sgd_or_muon or lion     a direction, and new moments
 *         -> move                          a target in units of the scale
 *         -> store_weights                 the target rounded
 *         -> inject                        the rounding error, into the first moment
 *                                          (WRITE_MOMENTUM only)
 *         -> store_moments
 *
 * A tile is short enough that all of its arrays stay in the first-level cache. */
#ifndef FP8MANIFOLD_TILE_H
#define FP8MANIFOLD_TILE_H

#include "elements.h"

#define TILE 512

typedef struct {
    int n;         /* elements */
    int64_t start; /* position of the first in the parameter */
    /* in units of the scale: the weights, their spacing, where they go, and that after
     * rounding */
    float value[TILE], ulp[TILE], target[TILE], rounded[TILE];
    float gradient[TILE], direction[TILE];
    float first[TILE], second[TILE]; /* moments */
    float root[TILE];                /* of the second moment */
    float denominator[TILE];         /* by which the first moment is divided */
    uint32_t words[TILE];            /* random */
    /* integers widened from memory, of in_one_loop.c */
    int32_t codes[TILE], residuals[TILE], first_codes[TILE], second_codes[TILE];
} Tile;

void load_weights(const Job *job, const PerScale *per_scale, Tile *tile);
void load_gradient(const Job *job, const PerScale *per_scale, Tile *tile);
void load_moments(const Job *job, const BlockScales *block, Tile *tile);
void adam(const Job *job, Tile *tile);
void sgd_or_muon(const Job *job, Tile *tile);
void lion(const Job *job, Tile *tile);
void move(const Job *job, const PerScale *per_scale, Tile *tile);
void store_weights(const Job *job, const PerScale *per_scale, Tile *tile);
void inject(const Job *job, const PerScale *per_scale, Tile *tile);
void store_moments(const Job *job, const BlockScales *block, Tile *tile);

/* MOMENT_FORMAT, whose numbers a compiler does not know here.  Those that it knows it builds
 * anew for each vector; others are read from memory. */
const Format *moment_format(void);

/* Takes a whole step of a tile, all stages. */
typedef void (*TakeTile)(const Job *, const PerScale *, const BlockScales *, Tile *);

/* The single loop that takes a job's steps, or NULL if there is none for its kind. */
TakeTile in_one_loop(const Job *job);

#endif
