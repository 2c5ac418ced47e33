// What else the rewriter offers to this library alone.
#pragma once
#include "rewriter/modules.h"
#include "rewriter/rewrite/install.h"
#include "tsmem/rewrite.h"
