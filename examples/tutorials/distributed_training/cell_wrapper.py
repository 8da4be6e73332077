"""Gradient accumulation: a training step over several batches."""

import mscomm.nn as nn
import mscomm.ops as ops
from mscomm import Tensor

add_to = ops.MultitypeFuncGraph("add_to")
clear = ops.MultitypeFuncGraph("clear")


@add_to.register("Tensor", "Tensor")
def _add_to(total, gradient):
    return ops.AssignAdd()(total, gradient)


@clear.register("Tensor")
def _clear(total):
    return ops.assign(total, ops.ZerosLike()(total))


class TrainAccuStepsCell(nn.TrainOneStepCell):
    """Adds the gradients of each batch to those of the batches before. update() combines them over the ranks, and lets
    the optimizer take a step with their mean."""

    def __init__(self, network, optimizer, sens=1.0):
        super().__init__(network, optimizer, sens)
        self.accu_grads = self.weights.clone(prefix="accu_grads", init="zeros")
        self.hyper_map = ops.HyperMap()
        self.batches = 0

    def construct(self, *inputs):
        """Return the loss of a batch, and add its gradients."""
        loss = self.network(*inputs)
        gradients = self.grad(lambda *_: loss, self.weights)(*inputs, ops.OnesLike()(loss) * self.sens)
        self.hyper_map(add_to, tuple(self.accu_grads), gradients)
        self.batches += 1
        return loss.detach()

    def update(self):
        """Take a step of the optimizer, and begin anew."""
        means = self.hyper_map(ops.Div(), tuple(self.accu_grads), (Tensor(float(self.batches)),) * len(self.weights))
        self.optimizer(self.grad_reducer(means))
        self.hyper_map(clear, tuple(self.accu_grads))
        self.batches = 0
