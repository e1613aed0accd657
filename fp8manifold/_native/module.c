/* Which sources the library was built from. */
#include "portable.h"

#ifndef SOURCES
#define SOURCES "unknown"
#endif

EXPORT const char *fp8manifold_sources(void);

/* The digest that the build passes on, as `digest` of _sources.py. */
const char *fp8manifold_sources(void) { return SOURCES; }
