// Errors of native ops: messages for users, without names of source files. In Python they are
// RuntimeErrors. Programs that retry with smaller batches look for " out of memory.".
#pragma once

#include <sstream>
#include <stdexcept>

namespace preact_kernels {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

}  // namespace preact_kernels

// Fails with these parts of a message unless `condition` holds.
#define PK_CHECK(condition, ...)                         \
  do {                                                   \
    if (!(condition)) preact_kernels::fail(__VA_ARGS__); \
  } while (false)
