"""The words that recall records are made of."""

# Short English words that are rare in Python source, so that a word in a record stands out from
# the code around it. Every word is one token of the embedded tokenizer when a space precedes it.
_TEXT = """
acid acorn actor agent alarm album amber anchor angle ankle apple april apron arch arena
arm arrow art ash atom attic aunt axis baby back badge bag baker ball band bank barn basin
bat bath bay beach bead beam bean bear bed bee bell belt bench berry bike blade blue boat
bolt bone book boot border bottle bowl boy brain brass bread brick broom brother brush
bucket bud build bull bus bush butter button cab cabin cable cage cake calm camel camera
camp canal candle canoe cap cape car card care cart case castle cat cave cedar cell center
chain chair chalk charm chart cherry chest chief child chin city clay clean clear cliff
clock cloth clover clown club coach coal coast coat coin cold color comb comet cook copper
coral cord corn corner cost cotton couch country course court cow crab cream creek crew
crop cross crow crowd crown cube cup curve dance danger dark dart dawn day deal deck deer
dent desert desk dial dime dinner dish ditch dock doctor dog doll dome door dot dove dream
dress dust ear east face fall fan fast field fig fire flag flat flock fly fog folder force
fork form fort free fur game gate giant glass gum hail hall harbor hard hat head heart heat
hen hill hip home hook inch ink inner iron jam jar jet kid king kit kite knot lace lake
lamb lamp land lantern laser lawn lead leg lens lid light lily lime linen lion lip lot love
mail march mass mat maze meal meat mile mill mind mine mint mule nail neck nest net nose
novel nut oak oar oat oil onion orange oven ox pack pail paint pan park patch pen pie pig
pin pine pipe pocket pool pot press proof pump race rack rail rain red reed reef ring round
rust sack sail sand sea seal seat seed shed ship shop sled soap sock soil song sound soup
south space stand star stem stick stone stool strong sun sword tail tent theme thin thumb
tin toad toast toe tone town toy trail train tray tree trunk twin van vase vault vest view
vine vote wall wash wasp watch wave wax way web west whip white wild wind window wine wing
winter wool wren yard yarn zone zoo
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())
