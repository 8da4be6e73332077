"""Section "Data Parallel Mode" of MindSpore's tutorial "Parallel Distributed Training (Ascend)": weights in checkpoints.

mscomm run -n 8 data_parallel_net.py

The import lines say mscomm instead of mindspore. Every other line that differs from the tutorial's ends with a comment:
`# tutorial:` and the tutorial's line, or `# added`. The tutorial's slips are:

* `context` and the loss are not imported, and `from context import` lacks its package. CreateData is the user's; here
  it is in parts.py.
* construct() takes the label, although the loss function gets it, and the network's constructor lacks test_size.
* `'./rank_{}_ckpt'.format(get_rank)` lacks a call, so all ranks would write into one folder.
* Momentum lacks its arguments, `loss_fb` should be `loss_fn`, and train() lacks the number of epochs and has a loss
  among its callbacks.
"""

from mscomm.train import Model
from mscomm.context import set_auto_parallel_context, reset_auto_parallel_context  # tutorial: from context import set_auto_parallel_context, reset_auto_parallel_context
from mscomm.nn import Momentum, Cell, Flatten, ReLU
from mscomm.train.callback import CheckpointConfig, ModelCheckpoint, LossMonitor
from mscomm.communication.management import get_rank
from mscomm.common.parameter import Parameter
from mscomm import Tensor
import mscomm.ops as ops
import numpy as np
from mscomm import ParallelMode, context, init  # added
from parts import CreateData, SoftmaxCrossEntropyExpand  # added
init()  # added
# define network
class DataParallelNet(Cell):
    def __init__(self, test_size, transpose_a=False, transpose_b=False, strategy=None, layerwise_parallel=True):
        super().__init__()
        weight_np = np.full(test_size, 0.1, dtype=np.float32)
        self.weight = Parameter(Tensor(weight_np), name="fc_weight", layerwise_parallel=layerwise_parallel)
        self.relu = ReLU()
        self.fc = ops.MatMul(transpose_a=transpose_a, transpose_b=transpose_b)
        if strategy is not None:
            self.fc.shard(strategy)

    def construct(self, inputs):  # tutorial: def construct(self, inputs, label):
        x = self.relu(inputs)
        x = self.fc(x, self.weight)
        return x

# create data sets
parallel_dataset = CreateData()
# set parallel strategy
strategy = ((1, 1), (1, 8))
# create network model
net = DataParallelNet((32, 32), strategy=strategy)  # tutorial: net = DataParallelNet(strategy=strategy)
# reset parallel mode
context.reset_auto_parallel_context()
# set parallel mode, data parallel mode is selected for training and model saving. If you want to choose auto parallel
# mode, you can simply change the value of parallel_mode parameter to ParallelMode.AUTO_PARALLEL.
context.set_auto_parallel_context(parallel_mode=ParallelMode.DATA_PARALLEL, device_num=8)

# config checkpoint
ckpt_config = CheckpointConfig(keep_checkpoint_max=1)
# define checkpoint save path
ckpt_path = './rank_{}_ckpt'.format(get_rank())  # tutorial: ckpt_path = './rank_{}_ckpt'.format(get_rank)
# create a ModelCheckpoint object
ckpt_callback = ModelCheckpoint(prefix='data_parallel', directory=ckpt_path, config=ckpt_config)
# set optimizer and loss function
opt = Momentum(net.trainable_params(), 0.01, 0.9)  # tutorial: opt = Momentum()
loss = SoftmaxCrossEntropyExpand()
model = Model(net, loss_fn=loss, optimizer=opt)  # tutorial: model = Model(net, loss_fb=loss, optimizer=opt)
# After training, the system will automatically save the checkpoint file.
model.train(2, train_dataset=parallel_dataset, callbacks=[ckpt_callback, LossMonitor()])  # tutorial: model.train(train_dataset=parallel_dataset, callbacks=[ckpt_callback, loss])
# After training, reset the parallel mode to avoid unnecessary trouble when retraining.
context.reset_auto_parallel_context()
