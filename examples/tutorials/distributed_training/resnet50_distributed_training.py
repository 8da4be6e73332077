"""The script of MindSpore's tutorial "Parallel Distributed Training (Ascend)", in AUTO_PARALLEL mode.

`bash run.sh DATA_PATH 2` starts it with a rank table.

The import lines say mscomm instead of mindspore. Every other line that differs from the tutorial's ends with a comment:
`# tutorial:` and the tutorial's line, or `# added`.

* The device is chosen by init(): the NPUs if every rank has one, otherwise the CPUs.
* The tutorial's slips: it calls init() only under `if __name__ == "__main__"`, which pytest does not run, and its
  blocks use `os` without an import.
* The tutorial's slip: data_path is defined nowhere. The shell scripts set the environment variable DATA_PATH.
* The sizes of the images, batches and epochs are adjustable.
"""

import mscomm.common.dtype as mstype
import os  # added
import mscomm.dataset as ds
import mscomm.dataset.transforms.c_transforms as C
import mscomm.dataset.vision.c_transforms as vision
from mscomm.communication.management import get_rank, get_group_size

def create_dataset(data_path, repeat_num=1, batch_size=int(os.getenv("BATCH_SIZE", "32")), rank_id=0, rank_size=1):  # tutorial: def create_dataset(data_path, repeat_num=1, batch_size=32, rank_id=0, rank_size=1):
    resize_height = int(os.getenv("IMAGE_SIZE", "224"))  # tutorial: resize_height = 224
    resize_width = int(os.getenv("IMAGE_SIZE", "224"))  # tutorial: resize_width = 224
    rescale = 1.0 / 255.0
    shift = 0.0

    # get rank_id and rank_size
    rank_id = get_rank()
    rank_size = get_group_size()
    data_set = ds.Cifar10Dataset(data_path, num_shards=rank_size, shard_id=rank_id)

    # define map operations
    random_crop_op = vision.RandomCrop((32, 32), (4, 4, 4, 4))
    random_horizontal_op = vision.RandomHorizontalFlip()
    resize_op = vision.Resize((resize_height, resize_width))
    rescale_op = vision.Rescale(rescale, shift)
    normalize_op = vision.Normalize((0.4465, 0.4822, 0.4914), (0.2010, 0.1994, 0.2023))
    changeswap_op = vision.HWC2CHW()
    type_cast_op = C.TypeCast(mstype.int32)

    c_trans = [random_crop_op, random_horizontal_op]
    c_trans += [resize_op, rescale_op, normalize_op, changeswap_op]

    # apply map operations on images
    data_set = data_set.map(operations=type_cast_op, input_columns="label")
    data_set = data_set.map(operations=c_trans, input_columns="image")

    # apply shuffle operations
    data_set = data_set.shuffle(buffer_size=10)

    # apply batch operations
    data_set = data_set.batch(batch_size=batch_size, drop_remainder=True)

    # apply repeat operations
    data_set = data_set.repeat(repeat_num)

    return data_set

import mscomm.ops as ops
from mscomm import Tensor
import mscomm.common.dtype as mstype
import mscomm.nn as nn

class SoftmaxCrossEntropyExpand(nn.Cell):
    def __init__(self, sparse=False):
        super(SoftmaxCrossEntropyExpand, self).__init__()
        self.exp = ops.Exp()
        self.sum = ops.ReduceSum(keep_dims=True)
        self.onehot = ops.OneHot()
        self.on_value = Tensor(1.0, mstype.float32)
        self.off_value = Tensor(0.0, mstype.float32)
        self.div = ops.Div()
        self.log = ops.Log()
        self.sum_cross_entropy = ops.ReduceSum(keep_dims=False)
        self.mul = ops.Mul()
        self.mul2 = ops.Mul()
        self.mean = ops.ReduceMean(keep_dims=False)
        self.sparse = sparse
        self.max = ops.ReduceMax(keep_dims=True)
        self.sub = ops.Sub()

    def construct(self, logit, label):
        logit_max = self.max(logit, -1)
        exp = self.exp(self.sub(logit, logit_max))
        exp_sum = self.sum(exp, -1)
        softmax_result = self.div(exp, exp_sum)
        if self.sparse:
            label = self.onehot(label, ops.shape(logit)[1], self.on_value, self.off_value)
        softmax_result_log = self.log(softmax_result)
        loss = self.sum_cross_entropy((self.mul(softmax_result_log, label)), -1)
        loss = self.mul2(ops.scalar_to_array(-1.0), loss)
        loss = self.mean(loss, -1)

        return loss

from mscomm import context
from mscomm.nn.optim.momentum import Momentum
from mscomm.train.callback import LossMonitor
from mscomm.train.model import Model
from mscomm.context import ParallelMode
from mscomm.communication.management import init  # added
from resnet import resnet50

device_id = int(os.getenv('DEVICE_ID'))
context.set_context(mode=context.GRAPH_MODE)  # tutorial: context.set_context(mode=context.GRAPH_MODE, device_target="Ascend")
context.set_context(device_id=device_id) # set device_id
init()  # added

def test_train_cifar(epoch_size=int(os.getenv("EPOCH_SIZE", "10"))):  # tutorial: def test_train_cifar(epoch_size=10):
    context.set_auto_parallel_context(parallel_mode=ParallelMode.AUTO_PARALLEL, gradients_mean=True)
    loss_cb = LossMonitor()
    dataset = create_dataset(os.environ["DATA_PATH"])  # tutorial: dataset = create_dataset(data_path)
    batch_size = 32
    num_classes = 10
    net = resnet50(batch_size, num_classes)
    loss = SoftmaxCrossEntropyExpand(sparse=True)
    opt = Momentum(filter(lambda x: x.requires_grad, net.get_parameters()), 0.01, 0.9)
    model = Model(net, loss_fn=loss, optimizer=opt)
    model.train(epoch_size, dataset, callbacks=[loss_cb], dataset_sink_mode=True)
