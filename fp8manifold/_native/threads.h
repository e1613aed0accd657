/* A function run in some threads, each with its own number; a thread that can't be started is run by the caller. */
#ifndef FP8MANIFOLD_THREADS_H
#define FP8MANIFOLD_THREADS_H

typedef void (*Share)(const void *context, int part, int parts);

void run_in_threads(Share share, const void *context, int threads);

#endif
