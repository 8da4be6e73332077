"""Trains ResNet-50 on CIFAR-10, data parallel, with checkpoints.

`bash run.sh DATA_PATH RANK_SIZE` starts this script with a rank table. Each rank saves checkpoints in its own
directory, ./rank_<rank>_ckpt. If there are checkpoints already, training continues after the newest checkpoint that
every rank has.
"""

import torch
from parts import EPOCH_SIZE, create_dataset, data_path, share_cpus
from resnet import resnet50

import mscomm
from mscomm import (
    CheckpointConfig,
    LossMonitor,
    Model,
    ModelCheckpoint,
    ParallelMode,
    get_rank,
    init,
    load_checkpoint,
    load_param_into_net,
    reset_auto_parallel_context,
    set_auto_parallel_context,
)

init()
share_cpus()

ckpt_path = f"./rank_{get_rank()}_ckpt"


def test_train_cifar(epoch_size=EPOCH_SIZE):
    # reset parallel mode
    reset_auto_parallel_context()
    set_auto_parallel_context(parallel_mode=ParallelMode.DATA_PARALLEL, gradients_mean=True)
    torch.manual_seed(1)  # every rank begins with the same weights
    loss_cb = LossMonitor()
    dataset = create_dataset(data_path(), usage="train")
    num_classes = 10
    net = resnet50(num_classes)
    loss = torch.nn.CrossEntropyLoss()
    opt = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)

    # config checkpoint: save one per epoch, and keep the two newest
    ckpt_config = CheckpointConfig(save_checkpoint_steps=dataset.get_dataset_size(), keep_checkpoint_max=2)
    ckpt_callback = ModelCheckpoint(prefix="data_parallel", directory=ckpt_path, config=ckpt_config)

    model = Model(net, loss_fn=loss, optimizer=opt)
    done = model.resume(ckpt_path)
    print(f"training begins behind epoch {done[0]} step {done[1]}" if done else "training begins", flush=True)
    model.train(epoch_size, dataset, callbacks=[loss_cb, ckpt_callback], dataset_sink_mode=True)
    # Reset the parallel mode, so that it does not affect a later training in this process.
    reset_auto_parallel_context()


def test_load_checkpoint():
    """Load the saved weights into a new network, and print its accuracy on the test images.

    Every rank gets the same number of images. For example, the digits data set has 299 test images. With two ranks,
    each rank gets 150 images, so one image is counted twice.
    """
    net = resnet50()
    param_dict = load_checkpoint(ckpt_path)
    assert load_param_into_net(net, param_dict) == ([], [])  # all names in the network and in the file match

    net.eval()
    counts = torch.zeros(2)  # how many images were classified correctly, and how many there are
    with torch.no_grad():
        for image, label in create_dataset(data_path(), usage="test"):
            right = net(torch.from_numpy(image)).argmax(1) == torch.from_numpy(label)
            counts += torch.tensor([right.sum(), len(right)])
    mscomm.all_reduce_(counts)
    print(f"accuracy: {counts[0] / counts[1]:.3f}", flush=True)
