// Let mpi4torch 0.1.3 compile, unchanged, against a torch whose autograd nodes count their own references.
//
// mpi4torch hands its nodes to set_history as shared pointers with torch's deleter, as torch asked until its
// nodes became intrusively counted. install.sh has the compiler include this file first where torch's headers
// no longer declare the deleter. It adds one reference count per node, nothing that the timings would show.
#pragma once
#ifdef __cplusplus
#include <memory>

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/extension.h>

namespace torch::autograd {

// The graph owns the node from set_history on; a second owner must not delete it.
inline void deleteNode(Node*) {}

template <typename Outputs>
void set_history(const Outputs& outputs, const std::shared_ptr<Node>& node) {
  set_history(outputs, c10::intrusive_ptr<Node>::unsafe_steal_from_new(node.get()));
}

}  // namespace torch::autograd
#endif
