import pytest
def test_o(oracle):
    ids=[1,9690,198,2683]
    import time; t=time.time(); g=oracle.greedy(ids,32); print(g, time.time()-t)
    lg=oracle.logits([*ids,*g]); assert lg.shape==(36,49152)
    assert lg[3:-1].argmax(-1).tolist()==g
    assert oracle.tie_rule(ids,g,g) is None
    bad=g[:5]+[g[5]+1]+g[6:]
    with pytest.raises(pytest.fail.Exception, match='token 5 is'): oracle.tie_rule(ids,bad,g)
    with pytest.raises(pytest.fail.Exception, match='31 tokens'): oracle.tie_rule(ids,g[:-1],g)
    assert oracle.greedy(ids,32,eos={g[3]})==g[:g.index(g[3])+1]
