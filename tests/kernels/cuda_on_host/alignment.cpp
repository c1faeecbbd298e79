// What -fsanitize=alignment calls: a GPU faults where a processor of the host reads on.

#include <cstdio>

#include "device.h"

namespace {

// As the compilers' runtime libraries declare them.
struct Location {
  const char* file;
  uint32_t line, column;
};
struct Type {
  uint16_t kind, info;
  char name[1];  // in quotes
};
struct Mismatch {
  Location location;
  const Type* type;
  unsigned char log_alignment, kind;
};

}  // namespace

extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(
    const Mismatch* mismatch, const void*) {
  const Location& location = mismatch->location;
  const std::string message = std::string(location.file) + ":" + std::to_string(location.line) +
                              ": an access of " + mismatch->type->name +
                              " that is not aligned to " +
                              std::to_string(1 << mismatch->log_alignment) + " bytes";
  cuda_on_host::Block* block = cuda_on_host::Block::running;
  if (block != nullptr) block->fail(message);
  std::fprintf(stderr, "%s\n", message.c_str());  // in the code of a launch
  std::abort();
}
