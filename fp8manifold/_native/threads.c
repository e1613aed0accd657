/* Threads for as long as a call lasts: none outlives it, so that nothing is lost in a fork. */
#include "threads.h"

#define MOST 64

#if defined(_WIN32)

void run_in_threads(Share share, const void *context, int threads)
{
    (void)threads;
    share(context, 0, 1);
}

#else

#include <pthread.h>

typedef struct {
    Share share;
    const void *context;
    int part, parts;
} Part;

static void *begin(void *given)
{
    const Part *part = given;
    part->share(part->context, part->part, part->parts);
    return 0;
}

void run_in_threads(Share share, const void *context, int threads)
{
    const int parts = threads < 1 ? 1 : threads > MOST ? MOST : threads;
    pthread_t handles[MOST];
    Part given[MOST];
    int started[MOST];
    for (int k = 1; k < parts; k++) {
        given[k] = (Part){share, context, k, parts};
        started[k] = pthread_create(&handles[k], 0, begin, &given[k]) == 0;
    }
    share(context, 0, parts);
    for (int k = 1; k < parts; k++) {
        if (started[k])
            pthread_join(handles[k], 0);
        else
            share(context, k, parts);
    }
}

#endif
