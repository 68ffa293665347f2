"""Networks beside DLRM and DLRM-DCN: FM, DeepFM, wide and deep; DIN and TBSM; towers for several labels."""
