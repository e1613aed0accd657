/* Some elements of a row as they pass from stage to stage, and the stages: load, direction, move, store. */
#ifndef FP8MANIFOLD_TILE_H
#define FP8MANIFOLD_TILE_H

#include "elements.h"

#define LOOP(...) \
    for (int i = 0; i < n; i++) { \
        __VA_ARGS__ \
    }

/* A loop for each value of a flag that is the same for all elements, so that no vector carries the choice. */
#define LOOP_FOR(flag, ...) \
    if (flag) { \
        enum { FLAG = 1 }; \
        LOOP(__VA_ARGS__) \
    } else { \
        enum { FLAG = 0 }; \
        LOOP(__VA_ARGS__) \
    }

/* Some elements of a row, as they pass from stage to stage. */
typedef struct {
    int n;
    int64_t at; /* position of the first in the parameter */
    float x[TILE], ulp[TILE], gradient[TILE], direction[TILE], target[TILE], after[TILE];
    float first[TILE], second[TILE], root[TILE], denominator[TILE];
    uint32_t words[TILE];
    int32_t codes[TILE], rest[TILE], first_codes[TILE], second_codes[TILE];
} Tile;

/* The scales of a block's averages, before and after the step. */
typedef struct {
    float first, first_inverse, second, second_inverse;
} Block;

void load_weights(const Job *j, const Local *l, Tile *t);
void load_gradient(const Job *j, const Local *l, Tile *t);
void load_averages(const Job *j, const Block *b, Tile *t);
void adam(const Job *j, Tile *t);
void sgd(const Job *j, Tile *t);
void lion(const Job *j, Tile *t);
void move(const Job *job, const Local *local, Tile *t);
void store_weights(const Job *j, const Local *l, Tile *t);
void inject(const Job *job, const Local *local, Tile *t);
void store_averages(const Job *j, const Block *b, Tile *t);

/* A loop that takes all of a step, and the one for a job, or NULL. */
typedef void (*InOneLoop)(const Job *, const Local *, const Block *, Tile *);
InOneLoop in_one_loop(const Job *j);

#endif
