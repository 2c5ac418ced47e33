// What libtsmem.so shows of itself; everything else in it is hidden.
#pragma once
#define TSMEM_API __attribute__((visibility("default")))
