# SPDX-License-Identifier: BSD-3-Clause
# What bench_data.py compares with: torchvision's transforms on PIL images, on tensors and on
# batches that lie on a GPU, kornia's where it is installed, and torch's DataLoader.
from collections.abc import Callable
from importlib.util import find_spec

import torch
from data_report import ONE_DRAW
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import to_pil_image

HAS_KORNIA = find_spec("kornia") is not None
SHAPES = {"mnist": (1, 28, 28), "cifar": (3, 32, 32)}
MEAN = {"mnist": (0.1307,), "cifar": (0.4914, 0.4822, 0.4465)}
STD = {"mnist": (0.3081,), "cifar": (0.247, 0.2435, 0.2616)}
ROTATION, SCALE = 20, (0.8, 1.2)  # degrees, factors; as examples/mnist_recipe.py has them
ERASING = {"mnist": {"p": 0.5, "value": 0.5}, "cifar": {"p": 0.5, "scale": (0.02, 0.2)}}


def random_images(recipe: str, count: int, device: torch.device, seed: int = 0) -> Tensor:
    """uint8, [count, channels, height, width]."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (count, *SHAPES[recipe])
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8, device=device)


def torchvision_transforms(recipe: str, pil: bool = False) -> v2.Compose:
    """Of one image, or of a batch of tensors, to which every transform then does the same."""
    to_float = [v2.ToImage()] * pil + [v2.ToDtype(torch.float32, scale=True)]
    last = [v2.RandomErasing(**ERASING[recipe]), v2.Normalize(MEAN[recipe], STD[recipe], True)]
    if recipe == "mnist":
        bilinear = {"interpolation": v2.InterpolationMode.BILINEAR}
        turned = [
            v2.RandomRotation(ROTATION, **bilinear),
            v2.RandomAffine(0, scale=SCALE, **bilinear),
        ]
        moved = [v2.Pad(2), v2.RandomCrop(28), *turned]
    else:
        moved = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]
    return v2.Compose([*moved, *to_float, *last])


def kornia_transforms(recipe: str) -> Callable[[Tensor], Tensor]:
    """It draws for each image of a batch."""
    import kornia.augmentation as K

    normalize = K.Normalize(torch.tensor(MEAN[recipe]), torch.tensor(STD[recipe]))
    if recipe == "mnist":
        turned = [K.RandomRotation(float(ROTATION), p=1.0), K.RandomAffine(0.0, scale=SCALE, p=1.0)]
        moved = [K.RandomCrop((28, 28), padding=2), *turned]
    else:
        moved = [K.RandomCrop((32, 32), padding=4), K.RandomHorizontalFlip()]
    chain = nn.Sequential(*moved, K.RandomErasing(**ERASING[recipe]), normalize)
    return lambda x: chain(x.float().div_(255))


def on_device(recipe: str, device: torch.device) -> dict[str, Callable[[Tensor], Tensor]]:
    """What takes a batch of bytes there to normalized floats there."""
    found = {ONE_DRAW: torchvision_transforms(recipe)}
    if HAS_KORNIA:
        found["kornia"] = kornia_transforms(recipe)
    return found


def one_by_one(recipe: str, images: Tensor) -> dict[str, Callable[[], object]]:
    """Calls that augment all `images` (on the CPU) one after the other, as a loader's worker does;
    decoding is left out."""
    pil = [to_pil_image(image) for image in images]
    from_pil, from_tensor = (torchvision_transforms(recipe, pil=p) for p in (True, False))
    return {
        "torchvision, PIL": lambda: [from_pil(image) for image in pil],
        "torchvision, tensors": lambda: [from_tensor(image) for image in images],
    }


# --- a loader -------------------------------------------------------------------------------------


class PilImages(Dataset):
    """Decoded images with torchvision's transforms, as most training scripts have them."""

    def __init__(self, recipe: str, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = [to_pil_image(image) for image in images], labels.tolist()
        self.transforms = torchvision_transforms(recipe, pil=True)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transforms(self.images[index]), self.labels[index]


def data_loader(dataset: Dataset, batch: int, workers: int, device: torch.device) -> DataLoader:
    on_gpu = device.type == "cuda"
    options = {"pin_memory": on_gpu, "num_workers": workers, "persistent_workers": workers > 0}
    return DataLoader(dataset, batch, shuffle=True, drop_last=True, **options)


def batches_on_device(recipe: str, images: Tensor, labels: Tensor, batch: int):
    """Shuffled batches of what lies on the device, augmented there by torchvision: all images of a
    batch move alike, which is less than the others do."""
    transforms = torchvision_transforms(recipe)
    order = torch.randperm(len(images), device=images.device)
    for rows in order[: len(images) // batch * batch].split(batch):
        yield transforms(images[rows]), labels[rows]
