"""The settings of a cell of every row, as the papers and their code have them: what the presets must say."""

from __future__ import annotations

from fl_app.keys import Scalar

# Settings typed here, all of them: a key that is missing or too many is a failure.
CAC = {
    "num-clients": 40,
    "num-server-rounds": 500,
    "local-epochs": 5,
    "batch-size": 100,
    "learning-rate": 0.1,
    "momentum": 0.9,
    "train-samples": 500,
    "test-samples": 100,
    "max-update-norm": 0.0,
}
CAC_PATHOLOGICAL = CAC | {"partition": "pathological", "classes-per-client": 2, "pathological-assignment": "random"}
DAC = {
    "num-clients": 40,
    "num-server-rounds": 300,
    "batch-size": 100,
    "learning-rate": 0.01,
    "drop-last": True,
    "normalize": "symmetric",
    "max-update-norm": 0.0,
}
DAC_OWN = {
    "method": "feddac",
    "feddac.alpha": 200,
    "feddac.neighbours": 5,
    "feddac.batchnorm-statistics": "local",
}
DAC_TEXT = DAC | {"momentum": 0.9, "train-samples": 500, "test-samples": 100}
DAC_DIRICHLET_CODE = DAC | {
    "partition": "dirichlet",
    "dirichlet-alpha": 0.1,
    "dirichlet-balance": True,
    "min-samples": 40,
    "test-ratio": 0.25,
}
OBP = {
    "num-clients": 100,
    "num-server-rounds": 400,
    "fraction-train": 0.1,
    "local-epochs": 5,
    "batch-size": 32,
    "learning-rate": 0.01,
    "model": "cnn",
    "normalize": "mean-std",
    "partition": "dirichlet",
    "test-ratio": 0.25,
    "drop-single": True,
    "evaluate-every": 100,
    "max-update-norm": 0.0,
}
PAKE = {
    "num-clients": 20,
    "num-server-rounds": 1000,
    "fraction-train": 1.0,
    "local-epochs": 1,
    "batch-size": 10,
    "learning-rate": 0.005,
    "drop-last": True,
    "normalize": "symmetric",
    "model": "resnet18",
    "max-update-norm": 0.0,
}
PAKE_DIRICHLET = PAKE | {
    "partition": "dirichlet",
    "dirichlet-alpha": 0.1,
    "dirichlet-balance": True,
    "min-samples": 40,
    "test-ratio": 0.25,
}
PAKE_OWN = {
    "method": "fedpake",
    "fedpake.threshold": 0.2,
    "fedpake.delta": 0.2,
    "fedpake.batchnorm-statistics": "local",
}
SETTINGS: dict[str, dict[str, Scalar]] = {
    "fedcac/cifar100-pathological-2/pfedgate": CAC_PATHOLOGICAL
    | {
        "dataset": "cifar100",
        "model": "resnet10",
        "method": "pfedgate",
        "pfedgate.sparsity": 1.0,
    },
    "fedcac/cifar10-pathological-2/perfedmask": CAC_PATHOLOGICAL
    | {
        "dataset": "cifar10",
        "model": "resnet8",
        "method": "perfedmask",
        "perfedmask.capacity": 1.0,
        "finetune-epochs": 5,
    },
    "fedpake/cifar10-dirichlet-0.1/feddyn": PAKE_DIRICHLET
    | {
        "dataset": "cifar10",
        "method": "feddyn",
        "feddyn.alpha": 0.01,
        "feddyn.batchnorm-statistics": "local",
    },
    "fedpake/cifar10-dirichlet-0.1/scaffold": PAKE_DIRICHLET
    | {
        "dataset": "cifar10",
        "method": "scaffold",
        "scaffold.server-learning-rate": 1.0,
        "scaffold.batchnorm-statistics": "local",
    },
    "fedpake/cifar10-dirichlet-0.1-cnn/fedconcat": PAKE_DIRICHLET
    | {
        "dataset": "cifar10",
        "model": "cnn",
        "method": "fedconcat",
        "fedconcat.clusters": 5,
        "fedconcat.encoder-rounds": 50,
        "fedconcat.classifier-batches": 3,
    },
    "fedpake/cifar10-dirichlet-0.1-cnn": PAKE_DIRICHLET
    | PAKE_OWN
    | {
        "dataset": "cifar10",
        "model": "cnn",
        "fedpake.num-micro": 4,
        "fedpake.num-macro": 4,
    },
    "fedcac/tiny-imagenet-dirichlet-0.01": CAC
    | {
        "method": "fedcac",
        "dataset": "tiny-imagenet:tiny-imagenet-200",
        "model": "resnet10",
        "partition": "dirichlet-client",
        "dirichlet-alpha": 0.01,
        "fedcac.beta": 170,
        "fedcac.tau": 0.5,
    },
    "fedcac/cifar100-dirichlet-0.1": CAC
    | {
        "method": "fedcac",
        "dataset": "cifar100",
        "model": "resnet10",
        "partition": "dirichlet-client",
        "dirichlet-alpha": 0.1,
        "fedcac.beta": 170,
        "fedcac.tau": 0.4,
    },
    "fedcac/cifar10-pathological-2": CAC_PATHOLOGICAL
    | {
        "method": "fedcac",
        "dataset": "cifar10",
        "model": "resnet8",
        "fedcac.beta": 100,
        "fedcac.tau": 0.5,
    },
    "fedcac/cifar10-pathological-2/fedper": CAC_PATHOLOGICAL
    | {"method": "fedper", "dataset": "cifar10", "model": "resnet8"},
    "fedcac/cifar100-pathological-2/fedamp": CAC_PATHOLOGICAL
    | {
        "method": "fedamp",
        "dataset": "cifar100",
        "model": "resnet10",
        "fedamp.sigma": 100.0,
        "fedamp.alpha": 1e4,
        "fedamp.alpha-decay": 0.1,
        "fedamp.alpha-decay-every": 30,
    },
    "fedcac/cifar10-dirichlet-0.1/as-critical": CAC
    | {
        "method": "fedcac",
        "dataset": "cifar10",
        "model": "resnet8",
        "partition": "dirichlet-client",
        "dirichlet-alpha": 0.1,
        "fedcac.beta": 100,
        "fedcac.tau": 0.5,
        "fedcac.non-critical": "as-critical",
    },
    "feddac/cifar10-pathological-2": DAC_TEXT
    | DAC_OWN
    | {
        "dataset": "cifar10",
        "model": "cnn",
        "local-epochs": 10,
        "partition": "pathological",
        "classes-per-client": 2,
        "pathological-assignment": "blocks",
        "feddac.tau": 0.3,
    },
    "feddac/cifar100-dirichlet-0.1": DAC_TEXT
    | DAC_OWN
    | {
        "dataset": "cifar100",
        "model": "resnet10",
        "local-epochs": 5,
        "partition": "dirichlet-client",
        "dirichlet-alpha": 0.1,
        "feddac.tau": 0.5,
    },
    "feddac/tiny-imagenet-dirichlet-0.5": DAC_TEXT
    | DAC_OWN
    | {
        "dataset": "tiny-imagenet:tiny-imagenet-200",
        "model": "resnet18",
        "local-epochs": 5,
        "partition": "dirichlet-client",
        "dirichlet-alpha": 0.5,
        "feddac.tau": 0.7,
    },
    "feddac/cifar10-dirichlet-0.1-code": DAC_DIRICHLET_CODE
    | DAC_OWN
    | {
        "dataset": "cifar10",
        "model": "resnet10",
        "num-server-rounds": 200,
        "local-epochs": 5,
        "batch-size": 64,
        "learning-rate": 0.005,
        "feddac.tau": 0.3,
    },
    "feddac/cifar100-dirichlet-0.1-code": DAC_DIRICHLET_CODE
    | DAC_OWN
    | {
        "dataset": "cifar100",
        "model": "resnet10",
        "local-epochs": 5,
        "feddac.tau": 0.5,
    },
    "feddac/tiny-imagenet-pathological-20-code": DAC
    | DAC_OWN
    | {
        "dataset": "tiny-imagenet:tiny-imagenet-200",
        "model": "resnet18",
        "num-server-rounds": 400,
        "local-epochs": 10,
        "batch-size": 128,
        "partition": "pathological",
        "classes-per-client": 20,
        "pathological-assignment": "blocks",
        "train-samples": 0,
        "test-samples": -1,
        "test-ratio": 0.25,
        "feddac.tau": 0.7,
    },
    "feddac/emnist-pathological-2/pfedme": DAC_TEXT
    | {
        "dataset": "emnist-digits",
        "model": "cnn",
        "local-epochs": 10,
        "partition": "pathological",
        "classes-per-client": 2,
        "pathological-assignment": "blocks",
        "method": "pfedme",
        "pfedme.proximal-weight": 0.1,
        "pfedme.inner-steps": 5,
        "pfedme.inner-learning-rate": 0.01,
        "pfedme.outer-learning-rate": 0.01,
        "pfedme.beta": 1.0,
    },
    "feddac/cifar100-pathological-10/fedrep": DAC_TEXT
    | {
        "dataset": "cifar100",
        "model": "resnet10",
        "local-epochs": 5,
        "partition": "pathological",
        "classes-per-client": 10,
        "pathological-assignment": "blocks",
        "method": "fedrep",
        "fedrep.head-epochs": 1,
        "fedrep.body-epochs": 5,
    },
    "feddac/tiny-imagenet-dirichlet-0.1/fedprox": DAC_TEXT
    | {
        "dataset": "tiny-imagenet:tiny-imagenet-200",
        "model": "resnet18",
        "local-epochs": 5,
        "partition": "dirichlet-client",
        "dirichlet-alpha": 0.1,
        "method": "fedprox",
        "fedprox.mu": 0.9,
        "fedprox.batchnorm-statistics": "local",
    },
    "fedobp/emnist-dirichlet-0.1": OBP
    | {
        "method": "fedobp",
        "dataset": "emnist",
        "dirichlet-alpha": 0.1,
        "fedobp.quantile": 0.995,
    },
    "fedobp/svhn-dirichlet-0.5/lg-fedavg": OBP
    | {
        "method": "lg-fedavg",
        "dataset": "svhn",
        "dirichlet-alpha": 0.5,
        "lg-fedavg.shared": "first",
    },
    "fedobp/mnist-dirichlet-0.1/fedrep": OBP
    | {
        "method": "fedrep",
        "dataset": "mnist",
        "dirichlet-alpha": 0.1,
        "fedrep.head-epochs": 4,
        "fedrep.body-epochs": 1,
    },
    "fedobp/mnist-dirichlet-0.5/apfl": OBP
    | {
        "method": "apfl",
        "dataset": "mnist",
        "dirichlet-alpha": 0.5,
        "apfl.alpha": 0.5,
        "apfl.alpha-updates": "first-epoch",
        "apfl.alpha-decay": 0.02,
    },
    "fedobp/cifar10-dirichlet-0.1/fedala": OBP
    | {
        "method": "fedala",
        "dataset": "cifar10",
        "dirichlet-alpha": 0.1,
        "fedala.layers": 1,
        "fedala.sample-share": 0.8,
        "fedala.weight-learning-rate": 1.0,
        "fedala.threshold": 0.1,
    },
    "fedobp/svhn-dirichlet-0.5/flute": OBP
    | {
        "method": "flute",
        "dataset": "svhn",
        "dirichlet-alpha": 0.5,
        "flute.body-epochs": 1,
        "flute.collapse-weight": 0.25,
        "flute.head-weight": 0.0025,
        "flute.feature-weight": 0.005,
        "flute.head-learning-rate": 0.5,
    },
    "fedobp/medmnist-c-dirichlet-0.5/feddpa": OBP
    | {
        "method": "feddpa",
        "dataset": "medmnist-c",
        "dirichlet-alpha": 0.5,
        "feddpa.threshold": 0.4,
        "feddpa.threshold-meaning": "quantile",
        "feddpa.constraint": "none",
    },
    "fedobp/cifar100-dirichlet-0.1/floco": OBP
    | {
        "method": "floco",
        "dataset": "cifar100",
        "dirichlet-alpha": 0.1,
        "floco.endpoints": 10,
        "floco.projection-round": 10,
        "floco.radius": 0.1,
        "floco.personal-epochs": 0,
    },
    "fedobp/medmnist-a-dirichlet-0.1/pfedfda": OBP
    | {
        "method": "pfedfda",
        "dataset": "medmnist-a",
        "dirichlet-alpha": 0.1,
        "pfedfda.betas": "separate",
        "pfedfda.folds": 2,
        "pfedfda.eps": 1e-4,
    },
    "fedobp/emnist-dirichlet-0.1-resnet18/fedselect": OBP
    | {
        "method": "fedselect",
        "dataset": "emnist",
        "dirichlet-alpha": 0.1,
        "model": "resnet18-fedobp",
        "fedselect.rate": 0.25,
        "fedselect.limit": 0.3,
    },
    "fedobp/fashion-mnist-dirichlet-0.1-resnet18": OBP
    | {
        "method": "fedobp",
        "dataset": "fashion-mnist",
        "dirichlet-alpha": 0.1,
        "model": "resnet18-fedobp",
        "fedobp.quantile": 1 - 0.0018,
    },
    "fedobp/medmnist-a-table8/global-norm-cls": OBP
    | {
        "method": "fedobp",
        "dataset": "medmnist-a",
        "dirichlet-alpha": 0.1,
        "partition": "dirichlet-fl-bench",
        "partition-seed": 42,
        "momentum": 0.7,
        "fedobp.quantile": 0.9484,
        "fedobp.normalization": "global",
        "fedobp.scope": "classifier",
    },
    "fedpake/tiny-imagenet-pathological-20": PAKE
    | PAKE_OWN
    | {
        "dataset": "tiny-imagenet:tiny-imagenet-200",
        "partition": "pathological",
        "classes-per-client": 20,
        "pathological-assignment": "blocks",
        "train-samples": 0,
        "test-samples": -1,
        "test-ratio": 0.25,
        "fedpake.num-micro": 8,
        "fedpake.num-macro": 8,
    },
    "fedpake/cifar100-dirichlet-0.1-resnet34/fedprox": PAKE_DIRICHLET
    | {
        "method": "fedprox",
        "dataset": "cifar100",
        "model": "resnet34",
        "fedprox.mu": 0.001,
        "fedprox.batchnorm-statistics": "local",
    },
    "fedpake/cifar10-dirichlet-0.1-100-clients-half": PAKE_DIRICHLET
    | PAKE_OWN
    | {
        "dataset": "cifar10",
        "num-clients": 100,
        "fraction-train": 0.5,
        "fedpake.num-micro": 4,
        "fedpake.num-macro": 4,
    },
    "fedpake/cifar10-dirichlet-0.1-ablation/random-macro": PAKE_DIRICHLET
    | PAKE_OWN
    | {"dataset": "cifar10", "fedpake.num-micro": 4, "fedpake.num-macro": 4, "fedpake.random-macro": True},
    "fedpake/cifar100-dirichlet-0.01/ditto": PAKE_DIRICHLET
    | {
        "method": "ditto",
        "evaluate-global": True,
        "evaluate-every": 1,
        "dataset": "cifar100",
        "dirichlet-alpha": 0.01,
        "ditto.proximal-weight": 0.001,
    },
    "fedpake/cifar100-dirichlet-0.1-50-clients-half/fedala": PAKE_DIRICHLET
    | {
        "method": "fedala",
        "evaluate-global": True,
        "evaluate-every": 1,
        "dataset": "cifar100",
        "num-clients": 50,
        "fraction-train": 0.5,
        "fedala.layers": 1,
        "fedala.sample-share": 0.8,
        "fedala.weight-learning-rate": 1.0,
        "fedala.threshold": 0.1,
    },
    "fedpake/cifar10-dirichlet-0.1/moon": PAKE_DIRICHLET
    | {
        "method": "moon",
        "dataset": "cifar10",
        "moon.temperature": 1.0,
        "moon.batchnorm-statistics": "local",
    },
    "fedpake/cifar10-dirichlet-0.1/fedntd": PAKE_DIRICHLET
    | {
        "method": "fedntd",
        "dataset": "cifar10",
        "fedntd.batchnorm-statistics": "local",
    },
    "fedpake/cifar10-dirichlet-0.1/fedgen": PAKE_DIRICHLET
    | {
        "method": "fedgen",
        "dataset": "cifar10",
        "fedgen.generator-learning-rate": 5e-3,
        "fedgen.noise-dim": 512,
        "fedgen.hidden": 512,
        "fedgen.alpha": 1.0,
        "fedgen.beta": 0.0,
        "fedgen.decay": 1.0,
        "fedgen.diversity": 0.0,
        "fedgen.generator-steps": 1000,
        "fedgen.teacher": "ensemble",
        "fedgen.batchnorm-statistics": "local",
    },
    "fedpake/cifar10-dirichlet-0.1/fedbabu": PAKE_DIRICHLET
    | {
        "method": "fedbabu",
        "dataset": "cifar10",
        "finetune-epochs": 10,
        "fedbabu.finetune": "head",
    },
    "fedpake/cifar100-dirichlet-1.0/fedavg": PAKE_DIRICHLET
    | {
        "method": "fedavg",
        "dataset": "cifar100",
        "dirichlet-alpha": 1.0,
        "fedavg.batchnorm-statistics": "local",
    },
}
