/* Threads that live as long as a call: none outlives it, so that nothing is lost in a
 * fork. */
#include "threads.h"

#define MOST_THREADS 64

#if defined(_WIN32)

void run_in_threads(TakeShare take_share, const void *context, int threads)
{
    (void)threads;
    take_share(context, 0, 1);
}

#else

#include <pthread.h>

typedef struct {
    TakeShare take_share;
    const void *context;
    int part, parts;
} Share;

static void *take_in_thread(void *argument)
{
    const Share *share = argument;
    share->take_share(share->context, share->part, share->parts);
    return 0;
}

static int share_count(int threads)
{
    if (threads < 1)
        return 1;
    return threads > MOST_THREADS ? MOST_THREADS : threads;
}

void run_in_threads(TakeShare take_share, const void *context, int threads)
{
    const int parts = share_count(threads);
    pthread_t handles[MOST_THREADS];
    Share shares[MOST_THREADS];
    int is_started[MOST_THREADS];
    for (int part = 1; part < parts; part++) {
        shares[part] = (Share){take_share, context, part, parts};
        is_started[part] = pthread_create(&handles[part], 0, take_in_thread, &shares[part]) == 0;
    }
    take_share(context, 0, parts);
    for (int part = 1; part < parts; part++) {
        if (is_started[part])
            pthread_join(handles[part], 0);
        else
            take_share(context, part, parts);
    }
}

#endif
