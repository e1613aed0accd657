/* A function run in several threads, each of which takes its share of the work. */
#ifndef FP8MANIFOLD_THREADS_H
#define FP8MANIFOLD_THREADS_H

/* Takes share number `part` of `parts`. */
typedef void (*TakeShare)(const void *context, int part, int parts);

/* Returns when all shares have been taken.  The caller takes the first, and every share
 * for which no thread could be started. */
void run_in_threads(TakeShare take_share, const void *context, int threads);

#endif
