// Stands in for Apple's header; metal-cpp uses one name of it.
#pragma once

#include <stdint.h>

typedef double CFTimeInterval;
