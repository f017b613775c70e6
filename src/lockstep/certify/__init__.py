"""`lockstep certify`: whether an endpoint serves the model that it says it does.

`tables` computes what each hypothesis expects, with torch; `likelihood` weighs answers by them, in NumPy; `client`
sends requests and `run` decides.
"""
