/* Build tools for Python expect this function of a module; the library is loaded by ctypes and never imported. */
#include "portable.h"

EXPORT void *PyInit__kernels(void);

void *PyInit__kernels(void) { return 0; }
