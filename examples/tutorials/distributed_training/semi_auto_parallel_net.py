"""Section "Semi Auto Parallel Mode" of MindSpore's tutorial "Parallel Distributed Training (Ascend)".

mscomm run -n 8 semi_auto_parallel_net.py

Every line that differs from the tutorial's ends with a comment: `# tutorial:` and the tutorial's line, or `# added`.
The tutorial's slips are:

* The section has no import lines. CreateData is the user's; here it is in parts.py.
* The network compares, and a comparison has no gradient. Here it adds instead.
* Mul works element by element, so its two inputs have to be divided in the same way: ((1, 8), (1, 8)).
* construct() takes the label, although the loss function gets it, and the network's constructor lacks its sizes.
* `.format(get_rank)` lacks a call, so all ranks would write into one folder.
* Momentum lacks its arguments, `loss_fb` should be `loss_fn`, and train() lacks the number of epochs and has a loss
  among its callbacks.
"""

import numpy as np  # added
from mscomm import ParallelMode, Parameter, Tensor, context, init, ops  # added
from mscomm.communication import get_rank  # added
from mscomm.nn import Cell, Momentum  # added
from mscomm.train import CheckpointConfig, LossMonitor, Model, ModelCheckpoint  # added
from parts import CreateData, SoftmaxCrossEntropyExpand  # added
init()  # added
class SemiAutoParallelNet(Cell):
    def __init__(self, mul_size, test_size, strategy=None, strategy2=None):
        super().__init__()
        mul_np = np.full(mul_size, 0.5, dtype=np.float32)
        equal_np = np.full(test_size, 0.1, dtype=np.float32)
        self.mul_weight = Parameter(Tensor(mul_np), name="mul_weight")
        self.equal_weight = Parameter(Tensor(equal_np), name="equal_weight")
        self.mul = ops.Mul()
        self.equal = ops.Add()  # tutorial: self.equal = ops.Equal()
        if strategy is not None:
            self.mul.shard(strategy)
            self.equal.shard(strategy2)

    def construct(self, inputs):  # tutorial: def construct(self, inputs, label):
        x = self.mul(inputs, self.mul_weight)
        x = self.equal(x, self.equal_weight)
        return x

# create data sets
parallel_dataset = CreateData()
# set parallel strategy
strategy = ((1, 8), (1, 8))  # tutorial: strategy = ((1, 1), (1, 8))
# create network model
net = SemiAutoParallelNet((1, 32), (1, 32), strategy=strategy, strategy2=strategy)  # tutorial: net = SemiAutoParallelNet(strategy=strategy, strategy2=strategy)
# reset parallel mode
context.reset_auto_parallel_context()
# set parallel mode, data parallel mode is selected for training and model saving. If you want to choose auto parallel
# mode, you can simply change the value of parallel_mode parameter to ParallelMode.AUTO_PARALLEL.
context.set_auto_parallel_context(parallel_mode=ParallelMode.SEMI_AUTO_PARALLEL,
                               strategy_ckpt_save_file='./rank_{}_ckpt/strategy.txt'.format(get_rank()))  # tutorial: strategy_ckpt_save_file='./rank_{}_ckpt/strategy.txt'.format(get_rank))

# config checkpoint
ckpt_config = CheckpointConfig(keep_checkpoint_max=1)
# define checkpoint save path
ckpt_path = './rank_{}_ckpt'.format(get_rank())  # tutorial: ckpt_path = './rank_{}_ckpt'.format(get_rank)
# create a ModelCheckpoint object
ckpt_callback = ModelCheckpoint(prefix='semi_auto_parallel', directory=ckpt_path, config=ckpt_config)
# set optimizer and loss function
opt = Momentum(net.trainable_params(), 0.01, 0.9)  # tutorial: opt = Momentum()
loss = SoftmaxCrossEntropyExpand()
model = Model(net, loss_fn=loss, optimizer=opt)  # tutorial: model = Model(net, loss_fb=loss, optimizer=opt)
# After you've trained your network, the system will automatically save the checkpoint file.
model.train(2, train_dataset=parallel_dataset, callbacks=[ckpt_callback, LossMonitor()])  # tutorial: model.train(train_dataset=parallel_dataset, callbacks=[ckpt_callback, loss])
# After training, reset the parallel mode to avoid unnecessary trouble when retraining.
context.reset_auto_parallel_context()
