// How recurrences take a step's tokens.
#pragma once

#include "plan.h"

namespace ostro {

// Floats of a thread's room for tokens: what recurrences make of them before they advance a tile.
long recurred_floats(const Recurrence& recurrence);

}  // namespace ostro
