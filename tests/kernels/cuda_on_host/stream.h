// What a thread launches, in order, at the worst moment that a GPU may choose.
//
// A launch is held back until the next one. If that is dependent, its first block runs up to
// `wait_for_predecessors` before the held launch begins: on a GPU it may start while that runs, and
// need not see what it writes. The held launch then runs, and the next one is held, with the block
// that waits.
//
// The launch before the held one has ended by then, as kernels let the next one start after they
// waited.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "grid.h"

namespace cuda_on_host {

class Stream {
 public:
  void launch(std::unique_ptr<Grid> next) {
    const auto owners = std::move(owners_);  // of memory that the held launch may use
    owners_.clear();
    const std::unique_ptr<Grid> ahead = std::move(held_);
    if (next && ahead && next->start_early()) ++settings.early_starts;
    if (ahead) ahead->finish();
    held_ = std::move(next);
  }

  // Runs all that was launched.
  void synchronize() { launch(nullptr); }

  // Drops what was launched and has not run.
  void clear() { held_.reset(), owners_.clear(); }

  bool is_idle() const { return held_ == nullptr; }

  // Memory that the host frees now, which a GPU frees in the order of the stream.
  void keep(std::shared_ptr<void> owner) { owners_.push_back(std::move(owner)); }

 private:
  std::unique_ptr<Grid> held_;
  std::vector<std::shared_ptr<void>> owners_;
};
inline thread_local Stream stream;

}  // namespace cuda_on_host
