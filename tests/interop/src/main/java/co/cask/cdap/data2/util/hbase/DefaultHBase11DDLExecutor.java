package co.cask.cdap.data2.util.hbase;

import co.cask.cdap.spi.hbase.ColumnFamilyDescriptor;
import co.cask.cdap.spi.hbase.TableDescriptor;
import java.util.Map;
import javax.annotation.Nullable;
import org.apache.hadoop.hbase.HColumnDescriptor;
import org.apache.hadoop.hbase.HTableDescriptor;
import org.apache.hadoop.hbase.TableName;
import org.apache.hadoop.hbase.io.compress.Compression;
import org.apache.hadoop.hbase.regionserver.BloomType;
import org.apache.hadoop.hbase.security.access.Permission;

/**
 * Creates CDAP's tables in HBase with CDAP's attributes, but without observers, which HBase 2 cannot load. CDAP's
 * factory loads the class by this name.
 */
public final class DefaultHBase11DDLExecutor extends DefaultHBaseDDLExecutor {
  @Override
  protected HTableDescriptor getHTableDescriptor(TableDescriptor said) {
    HTableDescriptor table = new HTableDescriptor(TableName.valueOf(said.getNamespace(), said.getName()));
    for (ColumnFamilyDescriptor family : said.getFamilies().values()) {
      HColumnDescriptor column = new HColumnDescriptor(family.getName());
      column.setMaxVersions(family.getMaxVersions());
      column.setCompressionType(Compression.Algorithm.valueOf(family.getCompressionType().name()));
      column.setBloomFilterType(BloomType.valueOf(family.getBloomType().name()));
      family.getProperties().forEach(column::setValue);
      table.addFamily(column);
    }
    said.getProperties().forEach(table::setValue);
    return table;
  }

  @Override
  protected TableDescriptor getTableDescriptor(HTableDescriptor table) {
    throw new UnsupportedOperationException();
  }

  @Override
  protected void doGrantPermissions(String namespace, @Nullable String table, Map<String, Permission.Action[]> rights) {
    throw new UnsupportedOperationException();
  }
}
