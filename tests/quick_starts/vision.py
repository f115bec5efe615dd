from pathlib import Path

import ncl_multi as ncl

pictures = sorted(Path("pictures").glob("*.png"))
model = ncl.NonNegVision("resnet18", dims=512, size=32)
model.fit(pictures, out="runs/vision")  # SimCLR, no labels

model = ncl.load("runs/vision")
codes = model.encode(pictures)
print(ncl.explain(codes[[0]], codes[[1]]))
