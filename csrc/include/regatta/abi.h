// The number that the Python side and the compiled library must agree on, and the export marker.
#pragma once

// Raised by one whenever an operator's name, inputs, outputs or attributes, a packed weight layout,
// or a C function below changes meaning. predict/device/library.py holds the same number and
// refuses a library built with another, so that a stale build fails at load and not inside a
// kernel.
#define REGATTA_ABI 12

// The library is compiled with hidden visibility: only functions marked so can be called by name.
#define REGATTA_EXPORT extern "C" __attribute__((visibility("default")))
