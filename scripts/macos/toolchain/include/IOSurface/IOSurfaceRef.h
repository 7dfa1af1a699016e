// Stands in for Apple's header; metal-cpp passes the reference on.
#pragma once

typedef struct __IOSurface* IOSurfaceRef;
