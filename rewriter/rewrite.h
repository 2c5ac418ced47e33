// What else the rewriter offers to this library alone.
#pragma once
#include "rewriter/install.h"
#include "rewriter/modules.h"
#include "tsmem/rewrite.h"
