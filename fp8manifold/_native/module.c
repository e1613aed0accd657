/* What the library says of itself. */
#include "portable.h"

#ifndef SOURCES
#define SOURCES "unknown"
#endif

/* A digest of the sources it was built from. */
EXPORT const char *fp8manifold_sources(void);

const char *fp8manifold_sources(void) { return SOURCES; }
